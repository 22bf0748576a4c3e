"""Required calls, and calls of strict tools, of the demo model in six dialects, with 40 schemas."""

import json
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import combinations
from typing import Any

import httpx
import jsonschema
import pytest

from tests.acceptance import guided_languages
from tests.acceptance.conftest import Record
from tests.acceptance.guided_languages import LANGUAGES
from tests.acceptance.repetitions import repetitions
from tests.running_quire import RunningService, start_quire

# Each dialect with each schema, five times if the run is long.
CALLS = repetitions(1200)
STRICT_CALLS = repetitions(480)
LEAST_CALLED = 0.6
EARLIER_CALLS = 6
SCHEMAS_COUNT = 40
MAX_TOKENS = 160
AT_ONCE = 12
LEAST_FINISHED = 0.95
# By vLLM's names of the parsers, Quire's names of the formats.
NAMES = {
    "hermes": "hermes",
    "qwen3_coder": "qwen3-coder",
    "glm45": "glm",
    "deepseek_v31": "deepseek-v3.1",
    "pythonic": "pythonic",
    "gemma4": "gemma4",
}
DIALECTS = tuple(NAMES)
WHOLE = {name: task for name, task in LANGUAGES.items() if task.schema is not True}


def _schemas() -> list[tuple[str, dict[str, Any]]]:
    """Return prompts, and schemas of tools: each language as an argument, and pairs of them as two."""
    single = [(task.prompt, guided_languages.record(value=task.schema)) for task in WHOLE.values()]
    pairs = combinations(list(WHOLE.values())[:8], 2)
    double = [
        (f"{one.prompt} {other.prompt}", guided_languages.record(first=one.schema, second=other.schema))
        for one, other in pairs
    ]
    return [*single, *double][:SCHEMAS_COUNT]


SCHEMAS = _schemas()


@pytest.fixture(scope="module")
def gateways() -> Iterator[dict[str, str]]:
    """Gateways of one engine, by the dialect in which each holds it to calls."""
    with ExitStack() as stack:
        demo = stack.enter_context(closing(start_quire("--model", "demo")))
        urls = {}
        for dialect in DIALECTS:
            options = ("--engines", demo.addresses["engine"], "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0")
            one = RunningService("gateway", *options, "--tool-call-parser", dialect)
            stack.callback(one.close)
            one.output.wait_for(f"tool calls: {NAMES[dialect]}")  # the engine is connected
            urls[dialect] = one.output.wait_for("gateway listens for HTTP at ").split(" at ")[1]
        yield urls


def _earlier_calls(prompt: str, name: str) -> list[dict[str, Any]]:
    """Return a conversation in which the model has called the tool, so that it goes on calling."""
    messages: list[dict[str, Any]] = []
    for at in range(EARLIER_CALLS):
        function = {"name": name, "arguments": json.dumps({"value": "x"})}
        call = {"id": f"call{at}", "type": "function", "function": function}
        messages += [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": "Right."},
        ]
    return messages


def _called(gateways: dict[str, str], number: int, *, strict: bool = False) -> str:
    """Require one call, or let the model decide; return how it ended. Fails if a finished call is not valid."""
    dialect = DIALECTS[number % len(DIALECTS)]
    prompt, schema = SCHEMAS[number // len(DIALECTS) % len(SCHEMAS)]
    name = f"answer_{number % 3}"
    function = {"name": name, "description": "Takes the answer.", "parameters": schema, "strict": strict}
    before = _earlier_calls(prompt, name) if strict else []
    body = {
        "messages": [*before, {"role": "user", "content": prompt}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "auto" if strict else "required",
        "parallel_tool_calls": False,
        "max_tokens": MAX_TOKENS,
        "seed": number,
        "temperature": 1,
    }
    answer = httpx.post(f"{gateways[dialect]}/v1/chat/completions", json=body, timeout=600)
    assert answer.status_code == 200, (dialect, schema, answer.text)
    choice = answer.json()["choices"][0]
    calls = choice["message"].get("tool_calls", [])
    if strict and not calls:
        return "text"
    assert strict or choice["message"]["content"] in (None, ""), (dialect, choice)
    if choice["finish_reason"] == "length":
        return "cut"
    [call] = calls
    assert call["function"]["name"] == name
    jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
    return "finished"


def test_required_calls_in_six_dialects_are_valid(gateways: dict[str, str], record: Record) -> None:
    assert len(SCHEMAS) == SCHEMAS_COUNT
    with ThreadPoolExecutor(AT_ONCE) as threads:
        ends = Counter(threads.map(lambda number: _called(gateways, number), range(CALLS)))
    record(**ends)
    assert ends["finished"] >= LEAST_FINISHED * CALLS, ends


def test_calls_of_strict_tools_in_six_dialects_are_valid(gateways: dict[str, str], record: Record) -> None:
    with ThreadPoolExecutor(AT_ONCE) as threads:
        ends = Counter(threads.map(lambda number: _called(gateways, number, strict=True), range(STRICT_CALLS)))
    record(**ends)
    called = ends["finished"] + ends["cut"]
    assert called >= LEAST_CALLED * STRICT_CALLS, ends
    assert ends["finished"] >= LEAST_FINISHED * called, ends
