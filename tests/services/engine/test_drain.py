"""How an engine leaves: gateways hear of it at once, and what was cut off ends before their streams do."""

import ctypes
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.v1 import decoding_pb2, engine_pb2, engine_pb2_grpc
from tests.running_quire import RunningService
from tests.scrape import Scrape
from tests.services.engine.test_serve import Link

GRACE_SECONDS = 1.0
# One runs at a time, each for seconds: however late the signal comes, some are left when the grace time is over.
LONG = [f"long {number}" for number in range(20)]


@pytest.fixture
def engine(tiny_model: Callable[[str], Path], service: Callable[..., RunningService], tmp_path: Path) -> RunningService:
    """An engine that sends no heartbeat but the first, unless it has something to say."""
    manager = service("kvmanager", "--listen", f"unix:{tmp_path}/kvmanager.sock")
    one = service(
        "engine",
        *("--listen", f"unix:{tmp_path}/engine.sock", "--kvmanager", manager.address),
        *("--model", str(tiny_model("llama")), "--device-blocks", "128", "--threads", "1"),
        *("--heartbeat-seconds", "60", "--grace-seconds", str(GRACE_SECONDS)),
    )
    one.output.wait_for("engine is ready")
    return one


def test_gateways_receive_a_drain_at_once_and_each_end_before_their_streams_end(engine: RunningService) -> None:
    stub = engine_pb2_grpc.EngineStub(engine.channel)
    idle, busy = Link(stub), Link(stub)
    for name in LONG:
        busy.submit(name, 1900)
    busy.read_until(lambda response: response.load.running + response.load.waiting == len(LONG))
    assert not idle.read_until(lambda response: response.HasField("heartbeat")).draining
    begun = time.monotonic()
    engine.process.terminate()
    told = idle.read_until(lambda response: response.draining)
    assert told.HasField("heartbeat")
    assert told.load.running or told.load.waiting, "those that are there go on"
    idle.submit("late", 5)
    assert idle.refusal("late").reason == engine_pb2.REFUSAL_REASON_UNAVAILABLE
    (end,) = busy.finish(LONG[-1]).samples
    assert end.reason == decoding_pb2.FINISH_REASON_CANCELLED
    assert time.monotonic() - begun >= GRACE_SECONDS
    busy.half_close()  # reads the stream to its end, which is none by an error
    idle.half_close()
    assert all(response.draining for response in busy.responses[-2:])
    assert engine.ended() == 0  # one signal is enough, and it may get no second one while it ends


def test_a_signal_that_another_thread_receives_makes_an_idle_engine_detach_and_end(
    tiny_model: Callable[[str], Path], service: Callable[..., RunningService], tmp_path: Path
) -> None:
    """As one that arrives just before the event loop waits, it does not interrupt that wait."""
    manager = service("kvmanager", "--listen", f"unix:{tmp_path}/manager.sock")
    engine = service(
        "engine",
        *("--listen", f"unix:{tmp_path}/engine.sock", "--kvmanager", manager.address),
        *("--model", str(tiny_model("llama")), "--device-blocks", "32", "--threads", "1"),
    )
    engine.output.wait_for("engine is ready")
    pid = engine.process.pid
    thread = next(int(task.name) for task in Path(f"/proc/{pid}/task").iterdir() if int(task.name) != pid)
    assert ctypes.CDLL(None).tgkill(pid, thread, signal.SIGTERM) == 0
    assert engine.ended() == 0
    manager.output.wait_for("engine detached")
    assert not [line for line in manager.output.lines if "broke" in line]
    assert Scrape.of(manager.metrics_url).value("quire_kv_broken_streams_total") == 0
