"""Ranks, engines and the manager are killed or stopped in the middle of steps; streams continue at a second engine."""

import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.acceptance.conftest import Record
from tests.acceptance.repetitions import repetitions
from tests.faults import Processes, wait_until
from tests.running.deadly_engine import ANY_STEP, SWAP, order, ordered
from tests.running.failover import NAMES, Failing, check_equal, failovers, streams
from tests.running.ranks import workers_of
from tests.running_quire import Answer

ROUNDS = {"killed": repetitions(50), "stopped": repetitions(10)}
ORDER_SECONDS = 60
# Before the one in which a process is killed.
MAX_STEPS = {ANY_STEP: 100, SWAP: 3}
STREAMS = 24
TOKENS = 100
MAX_SECONDS = 300
RANK_SECONDS = 6  # ranks of a busy machine may respond late
RANKS = ("--tensor-parallel", "2", "--rank-seconds", str(RANK_SECONDS), "--attention-backend", "torch")
# Each with the kind of step in which processes are killed.
POOLS = {
    "large": (ANY_STEP, "--device-blocks", "1024"),
    "small": (SWAP, "--device-blocks", "36", "--host-blocks", "300", "--preemption", "swap"),
}

Fault = Callable[[Failing, random.Random, str], None]


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    processes = Processes()
    yield processes
    assert processes.end() == []


@pytest.fixture(scope="module", params=POOLS)
def pool(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def services(
    pool: str,
    tiny_model: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
    processes: Processes,
) -> Iterator[Failing]:
    options = (*POOLS[pool][1:], *RANKS)
    services = Failing(tmp_path_factory.mktemp("sockets"), str(tiny_model("llama")), processes.keep, options)
    yield services
    assert services.close() == [0, 0]


@pytest.fixture(scope="module")
def undisturbed(services: Failing) -> list[Answer]:
    running = services.run(streams(STREAMS, TOKENS, "undisturbed"), MAX_SECONDS)
    assert running.failures() == {}
    return running.answers


def kill(services: Failing, draw: random.Random, moment: str) -> None:
    """Kill rank 0, the other rank or the KV manager, in the middle of a step of an engine."""
    name = draw.choice(NAMES)
    engine = services.engines[name]
    victim = draw.choice(("rank 0", "rank 1", "rank 1", "manager"))
    pid = {
        "rank 0": engine.process.pid,
        "rank 1": workers_of(engine.process.pid)[0],
        "manager": services.manager.process.pid,
    }[victim]
    order(engine.address, pid, moment, draw.randrange(MAX_STEPS[moment]))
    wait_until(
        lambda: not ordered(engine.address) or not services.any_stream_runs(), "the order is obeyed", ORDER_SECONDS
    )
    assert not ordered(engine.address), f"no step of engine {name} was of the kind {moment}"
    if victim == "manager":
        services.manager.ended()
        services.restart_manager()
    else:
        assert engine.ended() == (1 if victim == "rank 1" else -signal.SIGKILL)


def stop_a_worker(services: Failing, draw: random.Random, _moment: str) -> None:
    """Stop a worker until its engine has ended."""
    engine = services.engines[draw.choice(NAMES)]
    os.kill(workers_of(engine.process.pid)[0], signal.SIGSTOP)
    assert engine.ended() == 1


@pytest.mark.parametrize(("name", "fault"), [("killed", kill), ("stopped", stop_a_worker)])
def test_streams_continue_unchanged_at_another_engine(
    services: Failing, pool: str, undisturbed: list[Answer], name: str, fault: Fault, record: Record
) -> None:
    failed_over = 0
    for rounds in range(1, ROUNDS[name] // 2 + 1):  # half of them with each pool
        services.mend()
        salt = f"{name} {rounds}"
        draw = random.Random(salt)
        running = services.run(streams(STREAMS, TOKENS, salt), MAX_SECONDS)
        running.wait_for_tokens(draw.randrange(1, 2 * TOKENS))
        fault(services, draw, POOLS[pool][0])
        assert running.failures() == {}
        check_equal(running.answers, undisturbed)
        services.check_that_nothing_is_left()
        failed_over += failovers(running.answers)
        record(rounds=rounds, streams=rounds * STREAMS, streams_that_failed_over=failed_over, other_tokens=0)
    assert failed_over > ROUNDS[name] // 2
