"""Hostile messages to a running KV manager with another engine attached."""

from collections.abc import Callable, Iterator

import grpc
import pytest

from quire.v1 import kvmanager_pb2_grpc
from tests.running_quire import RunningService
from tests.services.kvmanager import hostile_messages
from tests.services.kvmanager.attach_stream import Stream
from tests.services.kvmanager.hostile_messages import Hostile, Neighbour, field, send, step

MOST_MIB = 64
SHAPES = [
    "64 KiB of empty allocates",
    "4 MiB of empty allocates",
    "4 MiB of frees",
    "1 MiB of one allocate's tokens, each a field",
    "1 MiB of a request id",
    "1 MiB of condemned blocks",
    "1 MiB of unknown fields",
    "1 MiB of pins in a report",
    "1 MiB of release order in a report",
    "15 MiB of frees",
]


@pytest.fixture(scope="module")
def running(service: Callable[..., RunningService]) -> Iterator[RunningService]:
    one = service("kvmanager", "--listen", "127.0.0.1:0", "--lease-seconds", "60", "--map-listen", "")
    yield one
    assert one.close() == 0


@pytest.fixture(scope="module")
def neighbour(running: RunningService) -> Iterator[Neighbour]:
    one = Neighbour(running.address)
    yield one
    one.close()


@pytest.fixture
def stub(running: RunningService) -> kvmanager_pb2_grpc.KVManagerStub:
    return kvmanager_pb2_grpc.KVManagerStub(running.channel)


@pytest.mark.parametrize("name", SHAPES)
def test_a_hostile_message_is_refused_or_answered_in_bounded_memory(
    running: RunningService, neighbour: Neighbour, name: str
) -> None:
    hostile = next(one for one in hostile_messages.shapes() if one.name == name)
    pid = running.process.pid
    before = hostile_messages.resident_mib(pid)
    hostile_messages.reset_peak(pid)
    answers, code, details = send(running.address, hostile)
    assert code in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED), details
    if code is grpc.StatusCode.OK:
        assert len(answers) == 1 + len(hostile.messages)
    assert hostile_messages.resident_mib(pid, "VmHWM") - before < MOST_MIB
    assert neighbour.waits()[1] > 0


def test_a_prompt_of_a_million_tokens_is_accepted(stub: kvmanager_pb2_grpc.KVManagerStub) -> None:
    stream = Stream(stub).attach(engine_id="large", block_size=16, device_blocks=70_000)
    table = stream.allocate(1, 1_000_000)
    assert len(table) == 62_500
    assert stream.half_close() == []


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("step.allocates.request_id", field(9, field(3, b"a" * 513))),
        ("step.allocates.salt", field(9, field(4, b"a" * 513))),
        ("step.allocates.trace_parent", field(9, field(9, b"a" * 513))),
        ("step.pins.pin_id", field(3, field(2, b"a" * 513))),
    ],
)
def test_ids_and_salts_above_512_characters_are_refused_by_name(
    running: RunningService, name: str, entry: bytes
) -> None:
    for filling in (b"", bytes(field(9, b"")) * 9000):  # a small message, and one that is read in slices
        _, code, details = send(running.address, Hostile("", (step(entry, filling),)))
        assert (code, details) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            f"{name} must have at most 512 characters, not 513",
        )
