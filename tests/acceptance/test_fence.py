"""Two processes with one engine id at a running KV manager: the newer one stays attached, the older one ends."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quire.v1 import kvmanager_pb2 as pb
from quire.v1 import kvmanager_pb2_grpc
from tests.running_quire import RunningService
from tests.services.kvmanager.attach_stream import Stream, pools

SECONDS = 60
FAR_FUTURE = 2**62  # an incarnation that is newer than any process


@pytest.fixture
def manager() -> Iterator[RunningService]:
    one = RunningService("kvmanager", "--listen", "127.0.0.1:0", "--lease-seconds", "60", "--map-listen", "")
    yield one
    one.close()


@contextmanager
def engine(manager: RunningService, model: Path) -> Iterator[RunningService]:
    one = RunningService(
        *("engine", "--listen", "127.0.0.1:0", "--kvmanager", manager.address, "--model", str(model)),
        *("--device-blocks", "64", "--engine-id", "one"),
    )
    try:
        yield one
    finally:
        one.process.send_signal(signal.SIGCONT)
        one.kill()
        one.channel.close()


def stub_of(manager: RunningService) -> kvmanager_pb2_grpc.KVManagerStub:
    return kvmanager_pb2_grpc.KVManagerStub(manager.channel)


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def attached(manager: RunningService, incarnation: int = 0) -> int:
    """Wait for an incarnation newer than the given one, and return it."""
    found: list[pb.PoolInfo] = []

    def is_newer() -> bool:
        found[:] = pools(stub_of(manager))
        return bool(found) and found[0].incarnation > incarnation

    wait_for(is_newer)
    return found[0].incarnation


def test_an_engine_that_continues_after_its_successor_attached_ends(
    manager: RunningService, tiny_model: Callable[[str], Path]
) -> None:
    with engine(manager, tiny_model("llama")) as older:
        first = attached(manager)
        older.process.send_signal(signal.SIGSTOP)
        with engine(manager, tiny_model("llama")) as newer:
            second = attached(manager, first)
            older.process.send_signal(signal.SIGCONT)
            assert older.process.wait(SECONDS) != 0
            assert newer.process.poll() is None
            assert [pool.incarnation for pool in pools(stub_of(manager))] == [second]


def test_an_older_engine_does_not_attach_while_a_newer_one_is_in_its_handshake(
    manager: RunningService, tiny_model: Callable[[str], Path]
) -> None:
    newer = Stream(stub_of(manager))
    newer.send(register={"engine_id": "one", "incarnation": FAR_FUTURE, "block_size": 16, "device_blocks": 64})
    with engine(manager, tiny_model("llama")) as older:
        older.output.wait_for("refused the pool", SECONDS)
        assert older.process.wait(SECONDS) != 0
        newer.send(report=pb.ReportPage(last=True))
        assert attached(manager) == FAR_FUTURE
    newer.break_off()


def test_an_engine_killed_and_started_again_attaches_during_its_lease(
    manager: RunningService, tiny_model: Callable[[str], Path]
) -> None:
    with engine(manager, tiny_model("llama")):
        first = attached(manager)
    with engine(manager, tiny_model("llama")):
        assert attached(manager, first) > first
