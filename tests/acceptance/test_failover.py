"""Engines and links fail up to twenty times each, at random moments, under 32 streams on the demo model."""

import random
from collections.abc import Iterator

import grpc
import pytest

from tests.acceptance.conftest import Record
from tests.acceptance.repetitions import repetitions
from tests.faults import Processes, prompt
from tests.running.deadly_engine import DEADLY_SEED
from tests.running.failover import CHAINS, FAULTS, Failing, Fault, check_equal, failovers, streams
from tests.running_quire import Answer
from tests.scrape import Scrape

ROUNDS = repetitions(20)
STREAMS = 32
TOKENS = 40
NEIGHBOURS = 6
MAX_SECONDS = 300


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    processes = Processes()
    yield processes
    assert processes.end() == []


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory, processes: Processes) -> Iterator[Failing]:
    services = Failing(tmp_path_factory.mktemp("sockets"), "demo", keep=processes.keep)
    yield services
    assert services.close() == [0, 0]


@pytest.fixture(scope="module")
def undisturbed(services: Failing) -> list[Answer]:
    running = services.run(streams(STREAMS, TOKENS, "undisturbed"), MAX_SECONDS)
    assert running.codes() == {}
    assert failovers(running.answers) == 0
    return running.answers


@pytest.mark.parametrize("fault", (FAULTS | CHAINS).values(), ids=(FAULTS | CHAINS).keys())
def test_streams_fail_over_without_a_change_of_their_answers(
    services: Failing, undisturbed: list[Answer], fault: Fault, record: Record
) -> None:
    failed_over = 0
    for rounds in range(1, ROUNDS + 1):
        services.mend()
        salt = f"{fault.__name__} {rounds}"
        draw = random.Random(salt)
        running = services.run(streams(STREAMS, TOKENS, salt), MAX_SECONDS)
        running.wait_for_tokens(draw.randrange(STREAMS * TOKENS * 2 // 3))
        fault(services, draw)
        assert running.codes() == {}
        check_equal(running.answers, undisturbed)
        services.check_that_nothing_is_left()
        failed_over += failovers(running.answers)
        record(
            rounds=rounds,
            streams=rounds * STREAMS,
            samples=rounds * sum(len(answer.finished.samples) for answer in undisturbed),
            tokens=rounds * sum(answer.finished.usage.generated_tokens for answer in undisturbed),
            streams_that_failed_over=failed_over,
            other_tokens=0,
        )
    assert failed_over > 2 * ROUNDS


def test_a_deadly_request_ends_three_engines_and_fails_alone(services: Failing) -> None:
    services.mend()
    undisturbed = services.run([prompt(n, 30, TOKENS, "undisturbed") for n in range(NEIGHBOURS)])
    assert undisturbed.codes() == {}
    deadly = prompt(99, 30, TOKENS, "deadly")
    deadly.sampling.seed = DEADLY_SEED
    running = services.run([*(prompt(n, 30, TOKENS, "neighbours") for n in range(NEIGHBOURS)), deadly])
    assert services.restart_while_streams_run() == 3
    assert running.codes() == {NEIGHBOURS: grpc.StatusCode.INTERNAL}
    assert "3 engines were lost one after the other" in str(running.failures()[NEIGHBOURS])
    check_equal(running.answers[:NEIGHBOURS], undisturbed.answers)
    shown = Scrape.of(services.gateway.metrics_url)
    assert shown.value("quire_requests_given_up_total") == 1
    assert sum(shown.values("quire_isolated_attempts_total", "engine").values()) >= 1
    services.check_that_nothing_is_left()
