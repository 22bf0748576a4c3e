"""Cases of docs/kv-acceptance.md about leases."""

import time
from collections.abc import Callable

import pytest

from quire.v1 import kvmanager_pb2_grpc
from tests.running_quire import RunningService
from tests.services.kvmanager.attach_stream import Stream, pools

LEASE_SECONDS = 1
PATIENCE_SECONDS = 60  # beyond the lease
Stub = kvmanager_pb2_grpc.KVManagerStub


@pytest.fixture(scope="module")
def stub(service: Callable[..., RunningService]) -> Stub:
    return Stub(service("kvmanager", "--listen", "127.0.0.1:0", "--lease-seconds", f"{LEASE_SECONDS}").channel)


def names(stub: Stub) -> list[str]:
    return [pool.engine_id for pool in pools(stub)]


def wait_for(stub: Stub, wanted: list[str], deadline: float) -> float:
    """Wait until exactly these engines have pools; return the time."""
    while (found := names(stub)) != wanted:
        assert time.monotonic() < deadline, found
    return time.monotonic()


def test_76_all_pools_with_an_ended_lease_are_dropped_though_the_first_engine_reattached(stub: Stub) -> None:
    streams = [Stream(stub).attach(engine_id=name) for name in ("a", "b", "c", "d")]
    for stream in streams:
        stream.allocate(1, 6)
        stream.break_off()
    broken = time.monotonic()
    again = Stream(stub).attach(engine_id="a")
    wait_for(stub, ["a"], broken + LEASE_SECONDS + PATIENCE_SECONDS)
    assert again.half_close() == []
    assert names(stub) == []


def test_77_a_stream_that_breaks_again_has_a_full_lease(stub: Stub) -> None:
    Stream(stub).attach().break_off()
    time.sleep(LEASE_SECONDS / 2)
    second = Stream(stub).attach()
    assert second.registered.lease.ToSeconds() == LEASE_SECONDS
    second.allocate(1, 6)
    began = time.monotonic()
    second.break_off()
    assert wait_for(stub, [], began + LEASE_SECONDS + PATIENCE_SECONDS) >= began + LEASE_SECONDS


def test_78_an_engine_that_is_silent_for_longer_than_the_lease_keeps_its_pool(stub: Stub) -> None:
    engine = Stream(stub).attach()
    blocks = engine.allocate(1, 6)
    time.sleep(LEASE_SECONDS * 1.5)
    assert [(pool.engine_id, pool.sequences) for pool in pools(stub)] == [("engine", 1)]
    assert not set(engine.allocate(2, 6)) & set(blocks)
    assert engine.half_close() == []
