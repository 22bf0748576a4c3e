"""The KV manager refuses or answers hostile messages, while its memory stays bounded and other Steps continue."""

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from tests.running_quire import RunningService
from tests.services.kvmanager import hostile_messages
from tests.services.kvmanager.hostile_messages import Neighbour

MAX_MIB = 64
NAMES = [hostile.name for hostile in hostile_messages.shapes()]


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
    assert code in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
    if code is grpc.StatusCode.OK:
        assert len(answers) == 1 + len(hostile.messages)
    assert growth < MAX_MIB
    assert steps > 0
