"""Twenty-seven languages, asked of the demo model: what it says at 100 tokens, and how much of that ends."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema
import pytest

from quire.v1 import decoding_pb2, gateway_pb2
from tests.acceptance.conftest import Record
from tests.acceptance.guided_languages import LANGUAGES, Asked
from tests.running_quire import RunningQuire, start_quire

MOST_TOKENS = 100


@pytest.fixture(scope="module")
def demo(demo_model: Path) -> Iterator[RunningQuire]:
    one = start_quire("--model", "demo", "--dtype", "float32")
    yield one
    one.close()


def request(asked: Asked, seed: int | None) -> gateway_pb2.GenerateRequest:
    turn = {"role": "user", "content": f"{asked.prompt} Answer in JSON."}
    made = gateway_pb2.GenerateRequest(prompt=gateway_pb2.Prompt(chat={"messages": [turn]}))
    made.stopping.max_tokens = MOST_TOKENS
    made.sampling.temperature = 0 if seed is None else 1
    made.sampling.seed = seed or 0
    made.constraint.json_schema = json.dumps(asked.schema)
    return made


@pytest.mark.parametrize("seed", [None, 1, 2, 3], ids=["greedy", "seed 1", "seed 2", "seed 3"])
def test_no_answer_is_lost_in_blanks_or_digits(demo: RunningQuire, record: Record, seed: int | None) -> None:
    with ThreadPoolExecutor(9) as clients:
        answers = list(clients.map(lambda asked: demo.generate(request(asked, seed)), LANGUAGES.values()))
    unfinished = []
    for (name, asked), answer in zip(LANGUAGES.items(), answers, strict=True):
        assert not re.search(r"\s\s|\d{21}|\.\d{9}", answer.text), answer.text
        if answer.finished.samples[0].reason == decoding_pb2.FINISH_REASON_LENGTH:
            unfinished.append(name)
        elif name != "nullable":  # OpenAPI's keyword, which the validator does not know
            jsonschema.validate(json.loads(answer.text), asked.schema)
    record(languages=len(LANGUAGES), unfinished=unfinished, tokens=sum(len(answer.token_ids) for answer in answers))
    assert not unfinished
