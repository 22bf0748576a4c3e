"""The three services as separate processes: health, reflection, and restarts of each."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from quire.v1 import engine_pb2, engine_pb2_grpc, gateway_pb2, gateway_pb2_grpc, kvmanager_pb2, kvmanager_pb2_grpc
from services.cli.main import cli
from services.engine.servicer import EngineServicer
from tests.faults import Streams, wait_until
from tests.load import prompt_request, slow_request
from tests.running_quire import CALL_SECONDS, Answer, HealthWatch, RunningService, open_channel
from tests.scrape import Scrape
from tests.services.test_recording import of_file, replayed
from tests.timing import standing_still
from tests.tiny_models import CONTEXT

NAMES = {"kvmanager": "quire.v1.KVManager", "engine": "quire.v1.Engine", "gateway": "quire.v1.Gateway"}
PATIENCE_SECONDS = 4
LINK_TIMEOUT_SECONDS = 5
LEASE_SECONDS = 1
MAX_SEQUENCES, MAX_WAITING = 4, 2
PROMPT = "Blocks of keys and values"
PINNED = {"short": "Hi", "system": "A careful assistant answers in whole sentences and makes nothing up."}
LONG = 1900  # tokens: with 20 ms a token more than any test waits
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


class Services:
    """The services by name, with records and pinned prompts; each can be restarted at its address."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._records = folder / "records"
        pins = folder / "pins.jsonl"
        pins.write_text("".join(json.dumps({"name": name, "text": text}) + "\n" for name, text in PINNED.items()))
        self.addresses = {name: f"unix:{folder}/{name}.sock" for name in NAMES}
        self._arguments = {
            "kvmanager": ("--lease-seconds", str(LEASE_SECONDS), "--record-folder", str(self._records)),
            "engine": (
                *("--kvmanager", self.addresses["kvmanager"], "--model", str(model), "--device-blocks", "256"),
                *("--max-sequences", str(MAX_SEQUENCES), "--max-waiting", str(MAX_WAITING)),
                *("--seconds-without-kvmanager", str(PATIENCE_SECONDS), "--heartbeat-seconds", "0.3"),
            ),
            "gateway": (
                *("--engines", self.addresses["engine"]),
                *("--link-timeout-seconds", str(LINK_TIMEOUT_SECONDS), "--failovers", "0"),
                *("--pinned-prompts", str(pins)),
            ),
        }
        self.running: dict[str, RunningService] = {}

    def start(self, name: str) -> None:
        self.running[name] = self.start_another(name, self.addresses[name])

    def start_successor(self, name: str) -> RunningService:
        """Start a second process of a service, which has another address until `succeed`."""
        return self.start_another(name, f"{self.addresses[name]}.next")

    def succeed(self, name: str, successor: RunningService) -> None:
        """Move it to the address of its killed predecessor."""
        path = Path(self.addresses[name].removeprefix("unix:"))
        path.with_name(f"{path.name}.next").replace(path)
        successor.channel.close()
        successor.address, successor.channel = self.addresses[name], open_channel(self.addresses[name])
        self.running[name] = successor

    def start_another(self, name: str, address: str, *arguments: str) -> RunningService:
        return RunningService(name, "--listen", address, *self._arguments[name], *arguments)

    def watch(self, name: str) -> HealthWatch:
        return HealthWatch(self.running[name].channel, NAMES[name])

    @property
    def gateway(self) -> gateway_pb2_grpc.GatewayStub:
        return gateway_pb2_grpc.GatewayStub(self.running["gateway"].channel)

    @property
    def kvmanager(self) -> kvmanager_pb2_grpc.KVManagerStub:
        return kvmanager_pb2_grpc.KVManagerStub(self.running["kvmanager"].channel)

    def stream(self, max_tokens: int = LONG, *, slow: bool = True) -> Streams:
        """Start a request; a slow one has sent a token when this returns."""
        return start_stream(self.gateway, (slow_request if slow else prompt_request)(PROMPT, max_tokens), slow)

    def generate(self, max_tokens: int = 5) -> Answer:
        return Answer.of(self.gateway.Generate(prompt_request(PROMPT, max_tokens), timeout=CALL_SECONDS))

    def live_sequences(self) -> int:
        return sum(pool.sequences for pool in self.pools())

    def pools(self) -> list[kvmanager_pb2.PoolInfo]:
        return list(self.kvmanager.ListPools(kvmanager_pb2.ListPoolsRequest(), timeout=CALL_SECONDS).pools)

    def metrics(self, name: str) -> Scrape:
        return Scrape.of(self.running[name].metrics_url)

    def latest_record(self) -> Path:
        return max(self._records.iterdir(), key=lambda path: path.stat().st_ctime_ns)


def start_stream(
    gateway: gateway_pb2_grpc.GatewayStub, request: gateway_pb2.GenerateRequest, wait: bool = True
) -> Streams:
    stream = Streams(gateway, [request], CALL_SECONDS)
    stream.wait_for_tokens(int(wait))
    return stream


def failure_of(stream: Streams) -> grpc.RpcError:
    (failure,) = stream.failures().values()
    return failure


@pytest.fixture(scope="module")
def services(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    all_three = Services(tmp_path_factory.mktemp("sockets"), tiny_model("llama"))
    yield all_three
    statuses = {name: all_three.running[name].close() for name in reversed(NAMES) if name in all_three.running}
    assert not any(statuses.values()), statuses


@pytest.fixture(scope="module")
def ready(services: Services) -> Services:
    """The three services, started in reverse order: each waits for its dependencies."""
    services.start("gateway")
    gateway = services.watch("gateway")
    assert gateway.next() == "NOT_SERVING"
    services.start("engine")
    engine = services.watch("engine")
    assert engine.next() == "NOT_SERVING"
    services.start("kvmanager")
    assert engine.next() == "SERVING"
    read_until(gateway, "SERVING")
    gateway.close()
    engine.close()
    return services


@pytest.fixture(scope="module")
def expected(ready: Services) -> list[int]:
    return ready.generate(100).token_ids


def read_until(watch: HealthWatch, status: str) -> None:
    while watch.next() != status:
        pass


def check(service: RunningService, name: str) -> str:
    stub: Any = health_pb2_grpc.HealthStub(service.channel)
    status = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=CALL_SECONDS).status
    return health_pb2.HealthCheckResponse.ServingStatus.Name(status)


# Without an engine


def test_a_gateway_without_an_engine_is_live_but_not_ready_and_refuses_at_once(
    service: Callable[..., RunningService], tmp_path: Path
) -> None:
    engines = ("--engines", f"unix:{tmp_path}/none.sock")
    waits = ("--link-timeout-seconds", "3600", "--failover-seconds", "3600")
    gateway = service("gateway", "--listen", f"unix:{tmp_path}/gateway.sock", *engines, *waits)
    assert (check(gateway, ""), check(gateway, NAMES["gateway"])) == ("SERVING", "NOT_SERVING")
    with pytest.raises(grpc.RpcError) as caught:
        list(gateway_pb2_grpc.GatewayStub(gateway.channel).Generate(prompt_request(PROMPT, 5), timeout=CALL_SECONDS))
    # A queued request would fail with DEADLINE_EXCEEDED.
    assert (caught.value.code(), caught.value.details()) == (UNAVAILABLE, "no engine has connected yet")


# Health and reflection


@pytest.mark.parametrize("name", NAMES)
def test_the_empty_name_is_liveness_and_the_services_name_readiness(ready: Services, name: str) -> None:
    service = ready.running[name]
    assert (check(service, ""), check(service, NAMES[name])) == ("SERVING", "SERVING")
    with pytest.raises(grpc.RpcError) as caught:
        check(service, "quire.v1.Other")
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    other = HealthWatch(service.channel, "quire.v1.Other")
    assert other.next() == "SERVICE_UNKNOWN"
    other.close()


@pytest.mark.parametrize("name", NAMES)
def test_reflection_lists_and_describes_the_service(ready: Services, name: str) -> None:
    database = ProtoReflectionDescriptorDatabase(ready.running[name].channel)
    assert set(database.get_services()) >= {NAMES[name], "grpc.health.v1.Health"}
    file = database.FindFileContainingSymbol(NAMES[name])
    assert file.name == f"quire/v1/{name}.proto"


# Limits


def test_without_max_tokens_a_stream_ends_when_the_context_is_full(ready: Services) -> None:
    request = prompt_request("")
    request.prompt.token_ids.ids.extend([5] * (CONTEXT - 6))
    request.stopping.ClearField("max_tokens")
    answer = Answer.of(ready.gateway.Generate(request, timeout=CALL_SECONDS))
    assert answer.started.max_tokens == len(answer.token_ids) == 6


def test_a_full_queue_refuses_and_admits_again_when_a_request_ends(ready: Services) -> None:
    running = []
    for _ in range(MAX_SEQUENCES):
        running.append(ready.gateway.Generate(slow_request(PROMPT, LONG), timeout=CALL_SECONDS))
        assert next(running[-1]).HasField("started")
    waiting = [ready.gateway.Generate(prompt_request(PROMPT, 3), timeout=CALL_SECONDS) for _ in range(MAX_WAITING)]
    wait_until(lambda: ready.metrics("engine").value("quire_num_requests_waiting") == MAX_WAITING, "the queue is full")
    with pytest.raises(grpc.RpcError) as caught:
        ready.generate()
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(MAX_WAITING) in (caught.value.details() or "")
    for call in running:
        call.cancel()
    assert [len(Answer.of(call).token_ids) for call in waiting] == [3] * MAX_WAITING
    assert len(ready.generate().token_ids) == 5


# A killed KV manager


def test_requests_survive_a_restart_of_the_kv_manager(ready: Services, expected: list[int]) -> None:
    engine, other = ready.watch("engine"), ready.watch("engine")
    assert (engine.next(), other.next()) == ("SERVING", "SERVING")
    other.close()  # a watcher's end must not end the others
    running = ready.stream(100)
    successor = ready.start_successor("kvmanager")
    ready.running["kvmanager"].kill()
    assert engine.next() == "NOT_SERVING"
    new = ready.stream(100, slow=False)
    ready.succeed("kvmanager", successor)
    assert engine.next() == "SERVING"
    assert running.tokens() == new.tokens() == [expected]
    engine.close()


def test_requests_fail_and_the_gateway_is_not_ready_without_a_kv_manager(ready: Services) -> None:
    engine = ready.watch("engine")
    assert engine.next() == "SERVING"
    running = ready.stream()
    killed_at = time.monotonic()
    ready.running["kvmanager"].kill()
    record = ready.latest_record()
    assert replayed(record)["end"].startswith("its writer was interrupted")
    failure = failure_of(running)
    assert (failure.code(), failure.details()) == (
        UNAVAILABLE,
        f"the engine has been without its KV manager for more than {PATIENCE_SECONDS} s",
    )
    assert time.monotonic() - killed_at > PATIENCE_SECONDS * 0.9

    gateway = ready.watch("gateway")
    read_until(gateway, "NOT_SERVING")
    with pytest.raises(grpc.RpcError) as caught:
        ready.generate()
    assert caught.value.code() == UNAVAILABLE
    assert "lost their KV manager" in (caught.value.details() or "")
    ready.start("kvmanager")
    assert engine.next() == "NOT_SERVING"
    assert engine.next() == "SERVING"
    assert gateway.next() == "SERVING"
    assert len(ready.generate().token_ids) == 5
    assert ready.latest_record() != record
    assert any(entry.snapshot.keyed_blocks for entry in of_file(ready.latest_record())[1]), "no block was reported"
    wait_until(lambda: ready.live_sequences() == 0, "no request holds blocks")
    device = ready.pools()[0].device
    pins = CliRunner().invoke(cli, ["pins", "--address", ready.addresses["gateway"]]).output
    assert pins == f"system: {device.held * 16} tokens, in {device.held} blocks\n"
    engine.close()
    gateway.close()


# A killed gateway


def test_the_blocks_of_a_killed_gateways_requests_are_freed(ready: Services, tmp_path: Path) -> None:
    wait_until(lambda: ready.live_sequences() == 0, "no other request holds blocks")
    gateway = ready.start_another("gateway", f"unix:{tmp_path}/killed.sock")
    gateway.output.wait_for("gateway is ready")
    stream = start_stream(gateway_pb2_grpc.GatewayStub(gateway.channel), slow_request(PROMPT, LONG))
    assert ready.live_sequences() == 1
    gateway.kill()
    assert failure_of(stream).code() == UNAVAILABLE
    gateway.channel.close()
    wait_until(lambda: ready.live_sequences() == 0, "its blocks are freed")


# A stopped or killed engine


def test_a_stopped_engine_counts_as_lost_until_it_continues(ready: Services) -> None:
    gateway = ready.watch("gateway")
    assert gateway.next() == "SERVING"
    stream = ready.stream()
    with standing_still(ready.running["engine"].process.pid):
        assert gateway.next() == "NOT_SERVING"
        assert failure_of(stream).code() == UNAVAILABLE
    assert gateway.next() == "SERVING"
    assert len(ready.generate().token_ids) == 5
    gateway.close()


def test_an_engine_that_loads_its_model_is_unavailable() -> None:
    async def get_engine() -> engine_pb2.GetEngineResponse:
        server = grpc.aio.server()
        engine_pb2_grpc.add_EngineServicer_to_server(EngineServicer(1.0), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                return await engine_pb2_grpc.EngineStub(channel).GetEngine(engine_pb2.GetEngineRequest())
        finally:
            await server.stop(None)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        asyncio.run(get_engine())
    assert (caught.value.code(), caught.value.details()) == (UNAVAILABLE, "the engine is loading its model")


def test_a_killed_engine_fails_over_or_fails_its_requests_until_its_successor_is_ready(
    ready: Services, expected: list[int], tmp_path: Path
) -> None:
    """The first gateway fails over; the second refuses at once while no engine is connected."""
    patient = ready.start_another(
        "gateway", f"unix:{tmp_path}/patient.sock", "--failovers", "3", "--failover-seconds", "60"
    )
    patient.output.wait_for("gateway is ready")
    request = slow_request(PROMPT, 100)
    request.request_id = "failed-over"
    failed_over = start_stream(gateway_pb2_grpc.GatewayStub(patient.channel), request)
    gateway, output = ready.watch("gateway"), ready.running["gateway"].output
    assert gateway.next() == "SERVING"
    failing, seen, ends = ready.stream(), len(output.lines), ends_by_reason(ready)
    (pool,) = ready.pools()
    assert ready.metrics("kvmanager").values("quire_kv_pool_blocks", "engine") == {pool.engine_id: 256}
    record = ready.latest_record()

    ready.running["engine"].kill()
    assert failure_of(failing).code() == UNAVAILABLE
    assert gateway.next() == "NOT_SERVING"
    with pytest.raises(grpc.RpcError) as caught:
        ready.generate()
    assert caught.value.code() == UNAVAILABLE
    assert ends_by_reason(ready) == ends | {"error": ends["error"] + 1}
    wait_until(lambda: not ready.pools(), "its pool is dropped", CALL_SECONDS)
    wait_until(lambda: not has_engine_series(ready), "its series are dropped", CALL_SECONDS)
    assert replayed(record)["right"] is True

    ready.start("engine")
    assert gateway.next() == "SERVING"
    failed_over.wait_for_ends()
    (answer,) = failed_over.answers
    assert (answer.token_ids, answer.finished.timing.failovers) == (expected, 1)
    # Times at which no engine was connected are not attempts.
    assert "attempts=2 " in patient.output.wait_for("request ended request_id=failed-over")
    assert ready.generate(100).token_ids == expected
    assert "prompt must have at least 16 tokens" in output.wait_for("pinning 'short' failed", after=seen)
    output.wait_for("pinned 'system': ", after=seen)
    patient.close()
    gateway.close()


def has_engine_series(services: Services) -> bool:
    return any("engine" in sample.labels for sample in services.metrics("kvmanager").samples)


def ends_by_reason(services: Services) -> dict[str, float]:
    return services.metrics("gateway").values("quire_request_success_total", "finished_reason")
