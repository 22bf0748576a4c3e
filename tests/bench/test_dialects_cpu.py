"""The benchmark of dialects: its answers, its client's counts, and its rows."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from bench.loads.dialect_answers import FORMATS, THOUGHT, TOOLS, answers
from bench.loads.null_engine import ScriptedRunner
from bench.loads.workers.chat_client import counted
from bench.serving import dialects_cpu
from engine.schedule.request import Sampling
from engine.schedule.step_plan import StepPlan, Work
from services.gateway.dialects.dialect import Dialect
from services.gateway.dialects.events import CallEnd, CallStart, Reasoning, Text, merged
from services.gateway.dialects.offered_tools import OfferedTools
from services.gateway.dialects.parser import DialectParser

OFFERED = OfferedTools({one["function"]["name"]: one["function"]["parameters"] for one in TOOLS})
TOKENS = 1500  # of the tiny model, whose tokens are short


@pytest.fixture(scope="module")
def written(tiny_model: Callable[[str], Path]) -> dict[str, str]:
    """The answers as text."""
    folder = tiny_model("llama")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = answers(folder, TOKENS)
    assert {len(ids) for ids in found.values()} == {TOKENS}
    return {name: tokenizer.decode(ids, skip_special_tokens=False) for name, ids in found.items()}


@pytest.mark.parametrize("name", FORMATS)
def test_calls_of_an_answer_are_whole_and_have_text_behind_them(written: dict[str, str], name: str) -> None:
    parser = DialectParser(Dialect(THOUGHT, FORMATS[name]), OFFERED)
    events = merged(parser.push(written[name]) + parser.finish())
    starts = [event for event in events if isinstance(event, CallStart)]
    assert {event.name for event in starts} == OFFERED.names
    assert len(starts) == sum(isinstance(event, CallEnd) for event in events)
    assert isinstance(events[0], CallStart)
    assert isinstance(events[-1], Text)
    assert not parser.failures


def test_a_thought_is_half_of_its_answer(written: dict[str, str]) -> None:
    parser = DialectParser(Dialect(THOUGHT, None), in_thought=True)
    thought, text = merged(parser.push(written["thought"]) + parser.finish())
    assert isinstance(thought, Reasoning)
    assert isinstance(text, Text)
    assert 0.8 < len(thought.text) / len(text.text) < 1.2


def test_the_seed_of_a_request_selects_its_script() -> None:
    runner = ScriptedRunner([[5, 6, 7], [8, 9, 8]], 0.0, 0.0)

    def step(*sequences: int) -> list[int]:
        work = tuple(Work(one, (1,), 0, (), True, Sampling(seed=one % 2)) for one in sequences)
        return [one.token_id for one in runner.launch(StepPlan(1, (), work)).result()]

    assert [step(10, 11), step(11), step(10, 11), step(10)] == [[5, 8], [9], [6, 8], [7]]
    assert step(10) == [5]  # the sequence has ended, and another one may have its number


def test_the_client_counts_each_part_of_an_answer() -> None:
    call: dict[str, Any] = {"index": 0, "id": "1", "function": {"name": "a", "arguments": ""}}
    deltas = [
        *({"role": "assistant", "content": ""}, {"reasoning": "Hm.", "reasoning_content": "Hm."}, {"content": "Yes"}),
        *({"tool_calls": [call]}, {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}),
    ]
    events: list[dict[str, Any]] = [{"choices": [{"delta": delta}], "usage": None} for delta in deltas]
    usage = {"prompt_tokens": 7, "completion_tokens": 9}
    found = counted([*events, {"choices": [], "usage": usage}])
    assert found == {"chunks": 5, "text": 3, "thought": 3, "calls": 1, "arguments": 2, **usage}


def test_ratios_stand_beside_the_interval_of_plain_text_over_itself() -> None:
    def run(own: float, wait: float) -> dict[str, float]:
        return {
            "us_per_token": own,
            "plain_us_per_token": 40.0,
            "chunks_per_token": 1.0,
            "first_token_seconds": wait,
        }

    runs = [
        {name: run(40.0, 0.05) for name in dialects_cpu.ARMS}
        | {"again": run(40.0 + 0.1 * number, 0.05 + 0.001 * number), "thought": run(41.0, 0.056)}
        for number in range(5)
    ]
    rows = {row.metric: row for row in dialects_cpu.rows_of(runs)}
    assert json.dumps([row.value for row in rows.values()])
    assert (rows["thought_over_plain"].value, rows["thought_over_plain"].null) == (1.025, (1.0, 1.01))
    assert rows["thought_over_plain"].target == 1.05
    assert rows["thought_first_token_beyond_null_interval"].value == 0.04
    assert rows["text_beside_tools_first_token_beyond_null_interval"].value == 0.0
