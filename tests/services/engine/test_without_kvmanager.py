"""An engine without its KV manager: gateways learn of it, and of its end, without a request or a heartbeat."""

from collections.abc import Callable
from pathlib import Path

from quire.v1 import decoding_pb2, engine_pb2, engine_pb2_grpc
from tests.running_quire import RunningService
from tests.services.engine.test_serve import Link

# Long enough that a start of the KV manager is no part of what is seen.
SELDOM_SECONDS = "3600"


def test_an_idle_engine_reports_the_loss_and_the_return_of_its_manager_at_once(
    tiny_model: Callable[[str], Path], service: Callable[..., RunningService], tmp_path: Path
) -> None:
    at = f"unix:{tmp_path}/kvmanager.sock"
    manager = service("kvmanager", "--listen", at)
    engine = service(
        *("engine", "--listen", f"unix:{tmp_path}/engine.sock", "--kvmanager", at),
        *("--model", str(tiny_model("llama")), "--device-blocks", "128", "--threads", "1"),
        *("--heartbeat-seconds", SELDOM_SECONDS, "--seconds-without-kvmanager", "0.5"),
    )
    engine.output.wait_for("engine is ready")
    link = Link(engine_pb2_grpc.EngineStub(engine.channel))
    link.read_until(lambda response: not response.without_kvmanager)
    manager.kill()
    told = link.read_until(lambda response: response.without_kvmanager)
    assert not told.draining
    link.submit("meanwhile", 5)
    end = link.finish("meanwhile")
    assert [sample.reason for sample in end.samples] == [decoding_pb2.FINISH_REASON_FAILED]
    assert end.failure == engine_pb2.FAILURE_REASON_BLOCK_MANAGER
    service("kvmanager", "--listen", at)
    link.read_until(lambda response: not response.without_kvmanager)
    link.submit("after", 5)
    assert len(link.finish("after").samples) == 1
    assert len(link.tokens("after")) == 5
    link.break_off()
    engine.close()  # else the manager would wait for it to detach
