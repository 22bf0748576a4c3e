"""Guided decoding with the demo model: answers to 27 schemas finish within 100 tokens."""

import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema
import pytest

from quire.v1 import decoding_pb2, gateway_pb2
from tests.acceptance.conftest import Record
from tests.acceptance.guided_languages import LANGUAGES, Task
from tests.running_quire import Answer, RunningQuire, start_quire
from tests.services.test_guided_decoding import DATE
from tests.services.test_guided_decoding import request as constrained

MAX_TOKENS = 100
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "pets": {"type": "array", "items": {"enum": ["cat", "dog"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def demo(demo_model: Path) -> Iterator[RunningQuire]:
    one = start_quire("--model", "demo", "--dtype", "float32")
    yield one
    one.close()


def texts(answer: Answer) -> list[str]:
    samples = [""] * len(answer.finished.samples)
    for delta in answer.deltas:
        samples[delta.sample] += delta.text
    return samples


def check_ended(answer: Answer) -> None:
    assert {sample.reason for sample in answer.finished.samples} == {decoding_pb2.FINISH_REASON_STOP}


def request(task: Task, seed: int | None) -> gateway_pb2.GenerateRequest:
    turn = {"role": "user", "content": f"{task.prompt} Answer in JSON."}
    made = gateway_pb2.GenerateRequest(prompt=gateway_pb2.Prompt(chat={"messages": [turn]}))
    made.stopping.max_tokens = MAX_TOKENS
    made.sampling.temperature = 0 if seed is None else 1
    made.sampling.seed = seed or 0
    made.constraint.json_schema = json.dumps(task.schema)
    return made


@pytest.mark.parametrize("seed", [None, 1, 2, 3], ids=["greedy", "seed 1", "seed 2", "seed 3"])
def test_no_answer_runs_into_endless_blanks_or_digits(demo: RunningQuire, record: Record, seed: int | None) -> None:
    with ThreadPoolExecutor(9) as clients:
        answers = list(clients.map(lambda task: demo.generate(request(task, seed)), LANGUAGES.values()))
    unfinished = []
    for (name, task), answer in zip(LANGUAGES.items(), answers, strict=True):
        assert not re.search(r"\s\s|\d{21}|\.\d{9}", answer.text), answer.text
        if answer.finished.samples[0].reason == decoding_pb2.FINISH_REASON_LENGTH:
            unfinished.append(name)
        elif name != "nullable":  # OpenAPI's keyword, which the validator ignores
            jsonschema.validate(json.loads(answer.text), task.schema)
    record(languages=len(LANGUAGES), unfinished=unfinished, tokens=sum(len(answer.token_ids) for answer in answers))
    assert not unfinished


@pytest.mark.parametrize(("seed", "samples"), [(None, 1), (None, 2), (5, 2)])
def test_an_answer_is_json_of_its_schema(demo: RunningQuire, seed: int | None, samples: int) -> None:
    wanted = constrained(seed=seed, json_schema=json.dumps(PERSON))
    wanted.sampling.sample_count = samples
    answer = demo.generate(wanted)
    check_ended(answer)
    for text in texts(answer):
        jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.parametrize(("seed", "samples"), [(None, 1), (5, 2)])
def test_an_answer_is_matched_by_its_pattern(demo: RunningQuire, seed: int | None, samples: int) -> None:
    wanted = constrained(seed=seed, regex=DATE)
    wanted.sampling.sample_count = samples
    answer = demo.generate(wanted)
    check_ended(answer)
    assert all(re.fullmatch(DATE, text) for text in texts(answer)), texts(answer)


def test_an_answer_is_an_object(demo: RunningQuire) -> None:
    answer = demo.generate(constrained(json_object=True))
    check_ended(answer)
    assert isinstance(json.loads(answer.text), dict)


def test_the_bounds_of_the_settings_hold_for_blanks_and_digits(tiny_model: Callable[[str], Path]) -> None:
    options = ("--json-blanks=0", "--json-integer-digits=3", "--json-decimals=2", "--json-exponent-digits=1")
    one = start_quire("--model", str(tiny_model("llama")), *options)
    try:
        wanted = constrained(300, 1, json_schema='{"type": "array", "items": {"type": "number"}, "minItems": 20}')
        wanted.sampling.sample_count = 3
        for text in texts(one.generate(wanted)):
            assert re.fullmatch(r"\[(-?\d{1,3}(\.\d{1,2})?([eE][+-]?\d)?,?)*[-.eE]?\]?", text), text
    finally:
        one.close()
