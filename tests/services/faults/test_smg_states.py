"""The service for smg while its engine starts, is alone, is full and drains; and without its packages."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as smg_pb

from services.engine.settings import EngineSettings
from services.engine.smg import servicer
from services.engine.smg.serving import add_smg
from services.runtime.errors import SlowClient
from services.runtime.service import Readiness
from services.runtime.settings import InvalidSetting
from tests.running_quire import CALL_SECONDS, RunningService
from tests.scrape import Scrape
from tests.services.engine.smg.client import SmgAnswer, SmgClient, request_of

ROOT = Path(__file__).parents[4]


class Engine:
    """An engine that serves smg, its KV manager, and a client."""

    def __init__(self, running: ExitStack, model: Path, *options: str) -> None:
        self.kvmanager = running.enter_context(closing(RunningService("kvmanager", "--listen", "127.0.0.1:0")))
        own = ("--kvmanager", self.kvmanager.address, "--model", str(model), "--device-blocks", "64", "--smg")
        self.engine = running.enter_context(
            closing(RunningService("engine", "--listen", "127.0.0.1:0", *own, *options))
        )
        self.smg = SmgClient(self.engine.channel)

    def health(self) -> smg_pb.HealthCheckResponse:
        return self.smg.stub.HealthCheck(smg_pb.HealthCheckRequest(), timeout=CALL_SECONDS)


@pytest.fixture
def start(tiny_model: Callable[[str], Path]) -> Iterator[Callable[..., Engine]]:
    with ExitStack() as running:
        yield lambda *options: Engine(running, tiny_model("llama"), *options)


def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    return caught.value.code()


def test_a_draining_engine_finishes_its_requests_and_sends_smg_elsewhere(start: Callable[..., Engine]) -> None:
    one = start()
    one.engine.output.wait_for("engine is ready")
    assert one.health().healthy
    call = one.smg.begin(request_of("running", stream=True, slow=True, max_tokens=100))
    received = [next(call)]
    one.engine.process.terminate()
    while (health := one.health()).healthy:
        pass
    assert "draining" in health.message
    assert code_of(one.smg.begin(request_of("new"))) is grpc.StatusCode.UNAVAILABLE
    assert SmgAnswer([*received, *call]).complete.completion_tokens == 100
    assert one.engine.ended() == 0


def test_an_engine_without_its_kv_manager_is_not_healthy(start: Callable[..., Engine]) -> None:
    one = start("--seconds-without-kvmanager", "0.2")
    one.engine.output.wait_for("engine is ready")
    one.kvmanager.kill()
    one.engine.output.wait_for("engine is not ready")
    health = one.health()
    assert not health.healthy
    assert "KV manager" in health.message
    assert code_of(one.smg.begin(request_of("new"))) is grpc.StatusCode.UNAVAILABLE


def test_a_full_queue_is_refused_and_calls_and_subscribers_are_counted(start: Callable[..., Engine]) -> None:
    one = start("--max-waiting", "1", "--max-sequences", "1", "--token-budget", "64")
    one.engine.output.wait_for("engine is ready")
    events = one.smg.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), timeout=CALL_SECONDS)
    next(events)
    running = one.smg.begin(request_of("running", stream=True, slow=True, max_tokens=500))
    next(running)
    waiting = one.smg.begin(request_of("waiting", slow=True))
    (load,) = one.smg.stub.GetLoads(smg_pb.GetLoadsRequest(), timeout=CALL_SECONDS).loads
    while not load.num_waiting_reqs:
        (load,) = one.smg.stub.GetLoads(smg_pb.GetLoadsRequest(), timeout=CALL_SECONDS).loads
    assert code_of(one.smg.begin(request_of("refused"))) is grpc.StatusCode.RESOURCE_EXHAUSTED
    page = Scrape.of(one.engine.metrics_url)
    assert page.value("quire_smg_calls") == 2
    assert page.value("quire_smg_subscribers") == 1
    assert page.value("quire_smg_snapshots_total") == 1
    for call in (running, waiting, events):
        call.cancel()


def test_without_the_package_the_setting_is_refused_with_the_name_of_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "smg_grpc_proto", None)
    monkeypatch.delitem(sys.modules, "services.engine.smg.servicer")

    async def add() -> None:
        add_smg(grpc.aio.server(), EngineSettings(smg=True), Readiness())

    with pytest.raises(InvalidSetting, match=r"smg .*quire\[routers\]"):
        asyncio.run(add())


def test_an_engine_imports_the_package_only_where_it_serves_smg() -> None:
    code = "import sys, services.engine.server; print('smg_grpc_proto' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_subscriber_that_does_not_read_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "_WRITE_SECONDS", 0.01)

    class Blocked:
        async def write(self, _: Any) -> None:
            await asyncio.Event().wait()

    with pytest.raises(SlowClient):
        asyncio.run(servicer._write(Blocked(), common_pb2.KvEventBatch()))  # type: ignore[arg-type]
