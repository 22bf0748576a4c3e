"""Engines of models with sinks, latents and layers of several shapes are killed; no answer changes, of any kind."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire.v1 import gateway_pb2
from tests.acceptance.conftest import Record
from tests.faults import Processes, prompt
from tests.model_types.cases import case_named
from tests.model_types.checkpoints import write_served
from tests.running.failover import Failing, check_equal, failovers, kill, samples_of, streams
from tests.running_quire import Answer

ROUNDS = 5
STREAMS = 16
PARALLEL = 8  # of four samples each
TOKENS = 40
MODEL_TYPES = ("gpt_oss", "deepseek_v3", "gemma4_text")


@pytest.fixture(params=MODEL_TYPES)
def model(request: pytest.FixtureRequest, tiny_model: Callable[[str], Path], tmp_path: Path) -> Path:
    """The tiny checkpoint of a model type, with the tokenizer of another one."""
    write_served(case_named(request.param), tmp_path / "model", tiny_model("llama"))
    return tmp_path / "model"


@pytest.fixture
def services(model: Path, tmp_path: Path) -> Iterator[Failing]:
    processes = Processes()
    services = Failing(tmp_path, str(model), keep=processes.keep)
    yield services
    assert services.close() == [0, 0]
    assert processes.end() == []


def requests(salt: str) -> list[gateway_pb2.GenerateRequest]:
    """Return streams of all kinds, and prompts with four samples, always the same for a number."""
    made = [prompt(STREAMS + number, 20 + 5 * number, TOKENS, salt) for number in range(PARALLEL)]
    for number, one in enumerate(made):
        one.sampling.sample_count = 4
        one.sampling.temperature, one.sampling.seed = 1.0, number
    return [*streams(STREAMS, TOKENS, salt), *made]


def run(services: Failing, salt: str, draw: random.Random | None = None) -> list[Answer]:
    """Run the streams; with random numbers, kill an engine at one of their first tokens."""
    running = services.run(requests(salt), 120)
    if draw is not None:
        running.wait_for_tokens(draw.randrange((STREAMS + PARALLEL) * TOKENS))
        kill(services, draw)
    assert running.codes() == {}
    services.check_that_nothing_is_left()
    return running.answers


def test_no_answer_changes_when_engines_of_new_shapes_are_killed(services: Failing, record: Record) -> None:
    undisturbed = run(services, "undisturbed")
    assert failovers(undisturbed) == 0
    assert [len(samples_of(one)) for one in undisturbed[-PARALLEL:]] == [4] * PARALLEL
    assert any(len({tuple(sample.token_ids) for sample in samples_of(one)}) > 1 for one in undisturbed[-PARALLEL:])
    failed_over = 0
    for rounds in range(1, ROUNDS + 1):
        services.mend()
        answers = run(services, f"round {rounds}", random.Random(rounds))
        check_equal(answers, undisturbed)
        failed_over += failovers(answers)
    record(rounds=ROUNDS, streams=ROUNDS * len(undisturbed), streams_that_failed_over=failed_over, other_tokens=0)
    assert failed_over > ROUNDS
