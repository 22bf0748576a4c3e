"""A running KV manager, and engines that attach to it."""

import time
from collections.abc import Callable, Iterator

import pytest

from quire.v1 import kvmanager_pb2_grpc
from tests.running_quire import CALL_SECONDS, RunningService
from tests.services.kvmanager.attach_stream import Stream, pools


@pytest.fixture(scope="module")
def stub(service: Callable[..., RunningService]) -> kvmanager_pb2_grpc.KVManagerStub:
    return kvmanager_pb2_grpc.KVManagerStub(
        service("kvmanager", "--listen", "127.0.0.1:0", "--lease-seconds", "0").channel
    )


@pytest.fixture
def stream(stub: kvmanager_pb2_grpc.KVManagerStub) -> Iterator[Callable[[], Stream]]:
    """Return a factory of streams, which are closed at the end."""
    streams: list[Stream] = []

    def begin() -> Stream:
        streams.append(Stream(stub))
        return streams[-1]

    yield begin
    for one in streams:
        one.break_off()
    deadline = time.monotonic() + CALL_SECONDS
    while pools(stub) and time.monotonic() < deadline:
        pass  # each iteration is a call
    assert pools(stub) == [], "a broken stream left its pool"


@pytest.fixture
def engine(stream: Callable[[], Stream]) -> Stream:
    return stream().attach()
