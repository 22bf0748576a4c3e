"""An idle link reports at once that the engine lost its KV manager, and that it drains."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.v1 import decoding_pb2, engine_pb2, engine_pb2_grpc
from tests.running_quire import RunningService
from tests.scrape import Scrape
from tests.services.engine.link import Link

GRACE_SECONDS = 1.0


@pytest.fixture(scope="module")
def managers(service: Callable[..., RunningService], tmp_path_factory: pytest.TempPathFactory) -> list[RunningService]:
    """The KV manager, and its replacements."""
    return [service("kvmanager", "--listen", f"unix:{tmp_path_factory.mktemp('manager')}/kvmanager.sock")]


@pytest.fixture(scope="module")
def engine(
    tiny_model: Callable[[str], Path],
    service: Callable[..., RunningService],
    managers: list[RunningService],
    tmp_path_factory: pytest.TempPathFactory,
) -> RunningService:
    """An engine whose only heartbeat is the first, unless its state changes. The last test ends it."""
    one = service(
        *("engine", "--listen", f"unix:{tmp_path_factory.mktemp('engine')}/engine.sock"),
        *("--kvmanager", managers[0].address, "--seconds-without-kvmanager", "0.5"),
        *("--model", str(tiny_model("llama")), "--device-blocks", "128", "--threads", "1"),
        *("--heartbeat-seconds", "3600", "--grace-seconds", str(GRACE_SECONDS)),
    )
    one.output.wait_for("engine is ready")
    return one


def test_a_lost_and_a_restarted_kvmanager_are_reported_at_once(
    engine: RunningService, managers: list[RunningService], service: Callable[..., RunningService]
) -> None:
    link = Link(engine_pb2_grpc.EngineStub(engine.channel))
    link.read_until(lambda response: not response.without_kvmanager)
    managers[-1].kill()
    assert not link.read_until(lambda response: response.without_kvmanager).draining
    link.submit("meanwhile", 5)
    end = link.finish("meanwhile")
    assert [sample.reason for sample in end.samples] == [decoding_pb2.FINISH_REASON_FAILED]
    assert end.failure == engine_pb2.FAILURE_REASON_BLOCK_MANAGER
    managers.append(service("kvmanager", "--listen", managers[0].address))
    link.read_until(lambda response: not response.without_kvmanager)
    link.submit("after", 5)
    assert len(link.finish("after").samples) == 1
    assert len(link.tokens("after")) == 5
    link.break_off()


def test_a_drain_is_reported_at_once_and_requests_end_before_their_streams(
    engine: RunningService, managers: list[RunningService]
) -> None:
    stub = engine_pb2_grpc.EngineStub(engine.channel)
    idle, busy = Link(stub), Link(stub)
    busy.submit("long", 1900, slow=True)
    busy.read_until(lambda response: response.load.running)
    assert not idle.read_until(lambda response: response.HasField("heartbeat")).draining
    begun = time.monotonic()
    engine.process.terminate()
    drain = idle.read_until(lambda response: response.draining)
    assert drain.HasField("heartbeat")
    assert drain.load.running, "running requests continue"
    idle.submit("late", 5)
    assert idle.refusal("late").reason == engine_pb2.REFUSAL_REASON_UNAVAILABLE
    (end,) = busy.finish("long").samples
    assert end.reason == decoding_pb2.FINISH_REASON_CANCELLED
    assert time.monotonic() - begun >= GRACE_SECONDS
    for link in (busy, idle):
        link.half_close()  # the stream ends without an error
    assert all(response.draining for response in busy.responses[-2:])
    assert engine.ended() == 0
    managers[-1].output.wait_for("engine detached")
    assert not [line for line in managers[-1].output.lines if "broke" in line]
    assert Scrape.of(managers[-1].metrics_url).value("quire_kv_broken_streams_total") == 0
