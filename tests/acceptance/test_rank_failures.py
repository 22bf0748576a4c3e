"""Ranks, engines and the manager are killed and stopped at random moments: streams continue at a second engine."""

import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.acceptance.conftest import Record
from tests.faults import Processes
from tests.running.failover import NAMES, Failing, Fault, check_equal, failovers, kill, streams
from tests.running.ranks import workers_of
from tests.running_quire import Answer

ROUNDS = {"killed": 50, "stopped": 10}
STREAMS = 16
TOKENS = 60
MAX_SECONDS = 300
RANK_SECONDS = 3
RANKS = ("--tensor-parallel", "2", "--rank-seconds", str(RANK_SECONDS), "--attention-backend", "torch")
POOLS = {
    "large": ("--device-blocks", "1024"),
    "small": ("--device-blocks", "70", "--host-blocks", "200", "--preemption", "swap"),
}


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    processes = Processes()
    yield processes
    assert processes.end() == []


@pytest.fixture(scope="module", params=POOLS)
def services(
    request: pytest.FixtureRequest,
    tiny_model: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
    processes: Processes,
) -> Iterator[Failing]:
    options = (*POOLS[request.param], *RANKS)
    services = Failing(tmp_path_factory.mktemp("sockets"), str(tiny_model("llama")), processes.keep, options)
    yield services
    assert services.close() == [0, 0]


@pytest.fixture(scope="module")
def undisturbed(services: Failing) -> list[Answer]:
    running = services.run(streams(STREAMS, TOKENS, "undisturbed"), MAX_SECONDS)
    assert running.codes() == {}
    return running.answers


def kill_a_worker(services: Failing, draw: random.Random) -> None:
    engine = services.engines[draw.choice(NAMES)]
    os.kill(workers_of(engine.process.pid)[0], signal.SIGKILL)
    assert engine.ended() == 1


def kill_any(services: Failing, draw: random.Random) -> None:
    """Kill rank 0, another rank, or the KV manager."""
    draw.choice((kill, kill_a_worker, kill_a_worker, kill_the_manager))(services, draw)


def kill_the_manager(services: Failing, _draw: random.Random) -> None:
    services.restart_manager()


def stop_a_worker(services: Failing, draw: random.Random) -> None:
    """Stop a worker until its engine has ended."""
    engine = services.engines[draw.choice(NAMES)]
    os.kill(workers_of(engine.process.pid)[0], signal.SIGSTOP)
    assert engine.ended() == 1


@pytest.mark.parametrize(("name", "fault"), [("killed", kill_any), ("stopped", stop_a_worker)])
def test_streams_continue_unchanged_at_another_engine(
    services: Failing, undisturbed: list[Answer], name: str, fault: Fault, record: Record
) -> None:
    failed_over = 0
    for rounds in range(1, ROUNDS[name] // 2 + 1):  # half of them with each pool
        services.mend()
        salt = f"{name} {rounds}"
        draw = random.Random(salt)
        running = services.run(streams(STREAMS, TOKENS, salt), MAX_SECONDS)
        running.wait_for_tokens(draw.randrange(STREAMS * TOKENS * 2 // 3))
        fault(services, draw)
        assert running.codes() == {}
        check_equal(running.answers, undisturbed)
        services.check_that_nothing_is_left()
        failed_over += failovers(running.answers)
        record(rounds=rounds, streams=rounds * STREAMS, streams_that_failed_over=failed_over, other_tokens=0)
    assert failed_over > ROUNDS[name] // 2
