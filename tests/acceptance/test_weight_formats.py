"""Engines with quantized weights: prefix hits, preemption both ways and failovers leave their tokens equal."""

import random
from collections.abc import Callable, Iterator

import pytest

from tests.acceptance.conftest import Record
from tests.faults import Processes
from tests.running.failover import Failing, check_equal, failovers, kill, streams

FORMATS = ("auto", "int8", "int4")
ROUNDS = 2
STREAMS = 16
TOKENS = 60
MAX_SECONDS = 300
LARGE = ("--device-blocks", "1024")
WAYS = {
    "recomputed": ("--device-blocks", "40", "--preemption", "recompute"),
    "swapped": ("--device-blocks", "40", "--preemption", "swap", "--host-blocks", "400"),
}


@pytest.fixture
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Failing]]:
    processes, started = Processes(), []

    def start(weights: str, *options: str) -> Failing:
        given = ("--dtype", "bfloat16", "--weights", weights, *options)
        started.append(Failing(tmp_path_factory.mktemp("s"), "demo", keep=processes.keep, engine_options=given))
        return started[-1]

    yield start
    assert [one.close() for one in started] == [[0, 0]] * len(started)
    assert processes.end() == []


@pytest.mark.parametrize("weights", FORMATS)
def test_streams_have_equal_tokens_whatever_interrupts_them(
    start: Callable[..., Failing], record: Record, weights: str
) -> None:
    services = start(weights, *LARGE)
    undisturbed = services.run(streams(STREAMS, TOKENS, "undisturbed"), MAX_SECONDS)
    assert undisturbed.codes() == {}
    again = services.run(streams(STREAMS, TOKENS, "undisturbed"), MAX_SECONDS)  # all prefixes are cached
    assert again.codes() == {}
    check_equal(again.answers, undisturbed.answers)
    failed_over = 0
    for number in range(ROUNDS):
        services.mend()
        draw = random.Random(number)
        running = services.run(streams(STREAMS, TOKENS, f"round {number}"), MAX_SECONDS)
        running.wait_for_tokens(draw.randrange(STREAMS * TOKENS * 2 // 3))
        kill(services, draw)
        assert running.codes() == {}
        check_equal(running.answers, undisturbed.answers)
        failed_over += failovers(running.answers)
    assert failed_over
    preempted = {}
    for way, options in WAYS.items():
        small = start(weights, *options)
        running = small.run(streams(STREAMS, TOKENS, way), MAX_SECONDS)
        assert running.codes() == {}
        check_equal(running.answers, undisturbed.answers)
        preempted[way] = sum(answer.finished.timing.preemptions for answer in running.answers)
    assert all(preempted.values())
    record(weights=weights, streams_that_failed_over=failed_over, preemptions=preempted)
