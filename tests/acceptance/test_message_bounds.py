"""The KV manager refuses or answers hostile messages, while its memory stays bounded and other Steps continue."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from tests.running_quire import RunningService
from tests.services.kvmanager import hostile_messages
from tests.services.kvmanager.hostile_messages import Neighbour

MAX_MIB = 64
# Far longer than a Step of a neighbour takes, on any machine.
MAX_WAIT_SECONDS = 10
NAMES = [hostile.name for hostile in hostile_messages.shapes()]
# Messages of these sizes are beyond gRPC's bound; these Steps are legal.
TOO_LARGE = re.compile(r"(15|60) MiB ")
ANSWERED = re.compile(
    r"64 KiB of (empty allocates|frees)|1 MiB of one allocate's tokens|[17] MiB of one allocate's tokens below 0"
    r"|40 Steps of 5,000 allocates that are refused"
)


@pytest.fixture(scope="module")
def running() -> Iterator[RunningService]:
    one = RunningService("kvmanager", "--listen", "127.0.0.1:0", "--lease-seconds", "0", "--map-listen", "")
    yield one
    assert one.close() == 0


@pytest.fixture(scope="module")
def neighbour(running: RunningService) -> Iterator[Neighbour]:
    one = Neighbour(running.address)
    yield one
    one.close()


@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_message_is_refused_or_answered(
    running: RunningService, neighbour: Neighbour, name: str, record: Callable[..., Any]
) -> None:
    hostile = next(one for one in hostile_messages.shapes() if one.name == name)
    pid = running.process.pid
    before = hostile_messages.resident_mib(pid)
    hostile_messages.reset_peak(pid)
    neighbour.waits()
    answers, code, details = hostile_messages.send(running.address, hostile)
    longest_ms, steps = neighbour.waits()
    growth = hostile_messages.resident_mib(pid, "VmHWM") - before
    record({"growth_mib": growth, "longest_step_ms": longest_ms, "status": code.name, "details": details})
    assert code is expected_code(name), details
    if code is grpc.StatusCode.OK:
        assert len(answers) == 1 + len(hostile.messages)
    assert growth < MAX_MIB
    assert steps > 0
    assert longest_ms < 1000 * MAX_WAIT_SECONDS


def expected_code(name: str) -> grpc.StatusCode:
    if ANSWERED.fullmatch(name):
        return grpc.StatusCode.OK
    return grpc.StatusCode.RESOURCE_EXHAUSTED if TOO_LARGE.match(name) else grpc.StatusCode.INVALID_ARGUMENT
