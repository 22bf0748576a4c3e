"""The three services started one by one: health, reflection, and restarts of each."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from quire.v1 import engine_pb2, engine_pb2_grpc, gateway_pb2, gateway_pb2_grpc, kvmanager_pb2, kvmanager_pb2_grpc
from tests.faults import wait_until
from tests.load import prompt_request, slow_request
from tests.running_quire import CALL_SECONDS, Answer, HealthWatch, RunningService, open_channel
from tests.scrape import Scrape
from tests.timing import in_time, standing_still
from tests.tiny_models import CONTEXT

NAMES = {"kvmanager": "quire.v1.KVManager", "engine": "quire.v1.Engine", "gateway": "quire.v1.Gateway"}
PATIENCE_SECONDS = 4
LINK_TIMEOUT_SECONDS = 5
LEASE_SECONDS = 1
MAX_SEQUENCES, MAX_WAITING = 4, 2
PROMPT = "Blocks of keys and values"
LONG = 1900  # tokens: with 20 ms a token more than any test waits
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


class Services:
    """The services by name; each can be killed and started again at the same address."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.addresses = {name: f"unix:{folder}/{name}.sock" for name in NAMES}
        self._arguments = {
            "kvmanager": ("--lease-seconds", str(LEASE_SECONDS)),
            "engine": (
                *("--kvmanager", self.addresses["kvmanager"], "--model", str(model), "--device-blocks", "256"),
                *("--max-sequences", str(MAX_SEQUENCES), "--max-waiting", str(MAX_WAITING)),
                *("--seconds-without-kvmanager", str(PATIENCE_SECONDS), "--heartbeat-seconds", "0.3"),
            ),
            "gateway": (
                *("--engines", self.addresses["engine"]),
                *("--link-timeout-seconds", str(LINK_TIMEOUT_SECONDS), "--failovers", "0"),
            ),
        }
        self.running: dict[str, RunningService] = {}

    def start(self, name: str) -> None:
        self.running[name] = self.start_another(name, self.addresses[name])

    def start_successor(self, name: str) -> RunningService:
        """Start a service that is there already, but cannot be found before `succeed`."""
        return self.start_another(name, f"{self.addresses[name]}.next")

    def succeed(self, name: str, successor: RunningService) -> None:
        """Move it to the address of the dead one, without the time of a process start."""
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

    def generate(self, max_tokens: int = 5) -> Answer:
        return Answer.of(self.gateway.Generate(prompt_request(PROMPT, max_tokens), timeout=CALL_SECONDS))

    def live_sequences(self) -> int:
        return sum(pool.sequences for pool in self.pools())

    def pools(self) -> list[kvmanager_pb2.PoolInfo]:
        return list(self.kvmanager.ListPools(kvmanager_pb2.ListPoolsRequest(), timeout=CALL_SECONDS).pools)

    def engine_metric(self, name: str) -> float:
        return Scrape.of(self.running["engine"].metrics_url).value(name)


class Stream:
    """A generation that a thread reads."""

    def __init__(self, gateway: gateway_pb2_grpc.GatewayStub, request: gateway_pb2.GenerateRequest) -> None:
        self._call = gateway.Generate(request, timeout=CALL_SECONDS)
        self._first_delta = threading.Event()
        self._end: queue.SimpleQueue[Answer | grpc.RpcError] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def wait_for_delta(self) -> None:
        assert self._first_delta.wait(CALL_SECONDS)

    def end(self) -> Answer | grpc.RpcError:
        return self._end.get(timeout=2 * CALL_SECONDS)

    def failure(self) -> grpc.RpcError:
        end = self.end()
        assert isinstance(end, grpc.RpcError), f"it finished with {len(end.token_ids)} tokens"
        return end

    def _read(self) -> None:
        answer = Answer()
        try:
            for response in self._call:
                answer.add(response)
                if answer.deltas:
                    self._first_delta.set()
            self._end.put(answer)
        except grpc.RpcError as error:
            self._end.put(error)


@pytest.fixture(scope="module")
def services(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    all_three = Services(tmp_path_factory.mktemp("sockets"), tiny_model("llama"))
    yield all_three
    statuses = {name: all_three.running[name].close() for name in reversed(NAMES) if name in all_three.running}
    assert not any(statuses.values()), statuses


@pytest.fixture(scope="module")
def ready(services: Services) -> Services:
    """All three, started in the wrong order: each waits for its dependencies."""
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
    """The tokens of a long answer when nothing happens."""
    return ready.generate(100).token_ids


def read_until(watch: HealthWatch, status: str) -> None:
    while watch.next() != status:
        pass


def check(service: RunningService, name: str) -> str:
    stub: Any = health_pb2_grpc.HealthStub(service.channel)
    status = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=CALL_SECONDS).status
    return health_pb2.HealthCheckResponse.ServingStatus.Name(status)


# Before anything else is there


def test_a_gateway_without_an_engine_is_live_but_not_ready_and_refuses_at_once(
    service: Callable[..., RunningService], tmp_path: Path
) -> None:
    engines = ("--engines", f"unix:{tmp_path}/nobody.sock")
    waits = ("--link-timeout-seconds", "3600", "--failover-seconds", "3600")
    gateway = service("gateway", "--listen", f"unix:{tmp_path}/gateway.sock", *engines, *waits)
    assert (check(gateway, ""), check(gateway, NAMES["gateway"])) == ("SERVING", "NOT_SERVING")
    with pytest.raises(grpc.RpcError) as caught:
        list(gateway_pb2_grpc.GatewayStub(gateway.channel).Generate(prompt_request(PROMPT, 5), timeout=CALL_SECONDS))
    # A request that waited would fail with DEADLINE_EXCEEDED.
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


# Bounds that need other settings than most tests


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
    wait_until(lambda: ready.engine_metric("quire_num_requests_waiting") == MAX_WAITING, "the queue is full")
    with pytest.raises(grpc.RpcError) as caught:
        ready.generate()
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(MAX_WAITING) in (caught.value.details() or "")
    for call in running:
        call.cancel()
    assert [len(Answer.of(call).token_ids) for call in waiting] == [3] * MAX_WAITING
    assert len(ready.generate().token_ids) == 5


# The KV manager dies


def test_requests_survive_a_restart_of_the_kv_manager(ready: Services, expected: list[int]) -> None:
    engine, other = ready.watch("engine"), ready.watch("engine")
    assert (engine.next(), other.next()) == ("SERVING", "SERVING")
    other.close()  # one watcher that leaves must not silence the others
    running = Stream(ready.gateway, slow_request(PROMPT, 100))
    running.wait_for_delta()
    successor = ready.start_successor("kvmanager")
    ready.running["kvmanager"].kill()
    assert engine.next() == "NOT_SERVING"
    new = Stream(ready.gateway, prompt_request(PROMPT, 100))
    ready.succeed("kvmanager", successor)
    assert engine.next() == "SERVING"
    for stream in (running, new):
        end = stream.end()
        assert isinstance(end, Answer), end
        assert end.token_ids == expected
    engine.close()


def test_requests_fail_and_the_gateway_is_not_ready_without_a_kv_manager(ready: Services) -> None:
    engine = ready.watch("engine")
    assert engine.next() == "SERVING"
    running = Stream(ready.gateway, slow_request(PROMPT, LONG))
    running.wait_for_delta()
    killed_at = time.monotonic()
    ready.running["kvmanager"].kill()
    failure = running.failure()
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
    engine.close()
    gateway.close()


# The gateway dies


def test_the_blocks_of_a_killed_gateways_requests_are_freed(ready: Services, tmp_path: Path) -> None:
    wait_until(lambda: ready.live_sequences() == 0, "no other request holds blocks")
    gateway = ready.start_another("gateway", f"unix:{tmp_path}/killed.sock")
    gateway.output.wait_for("gateway is ready")
    stream = Stream(gateway_pb2_grpc.GatewayStub(gateway.channel), slow_request(PROMPT, LONG))
    stream.wait_for_delta()
    assert ready.live_sequences() == 1
    gateway.kill()
    assert stream.failure().code() == UNAVAILABLE
    gateway.channel.close()
    wait_until(lambda: ready.live_sequences() == 0, "its blocks are freed")


# The engine dies


def test_the_log_counts_attempts_and_not_the_times_that_no_engine_was_available(
    ready: Services, tmp_path: Path
) -> None:
    gateway = ready.start_another(
        "gateway", f"unix:{tmp_path}/patient.sock", "--failovers", "3", "--failover-seconds", "60"
    )
    gateway.output.wait_for("gateway is ready")
    request = slow_request(PROMPT, 100)
    request.request_id = "failed-over"
    stream = Stream(gateway_pb2_grpc.GatewayStub(gateway.channel), request)
    stream.wait_for_delta()
    ready.running["engine"].kill()
    ready.start("engine")
    end = stream.end()
    assert isinstance(end, Answer), end
    assert end.finished.timing.failovers == 1
    assert "attempts=2 " in gateway.output.wait_for("request ended request_id=failed-over")
    gateway.close()
    watch = ready.watch("gateway")
    read_until(watch, "SERVING")
    watch.close()


def test_a_stopped_engine_counts_as_lost_until_it_continues(ready: Services) -> None:
    gateway = ready.watch("gateway")
    assert gateway.next() == "SERVING"
    stream = Stream(ready.gateway, slow_request(PROMPT, LONG))
    stream.wait_for_delta()
    with standing_still(ready.running["engine"].process.pid):
        assert gateway.next() == "NOT_SERVING"
        assert stream.failure().code() == UNAVAILABLE
    assert gateway.next() == "SERVING"
    assert len(ready.generate().token_ids) == 5
    gateway.close()


def test_a_gateway_refuses_at_once_while_its_killed_engine_has_no_successor(
    ready: Services, expected: list[int]
) -> None:
    gateway = ready.watch("gateway")
    assert gateway.next() == "SERVING"
    stream = Stream(ready.gateway, slow_request(PROMPT, LONG))
    stream.wait_for_delta()
    ready.running["engine"].kill()
    assert stream.failure().code() == UNAVAILABLE
    assert gateway.next() == "NOT_SERVING"
    with pytest.raises(grpc.RpcError) as caught:
        ready.generate()
    assert caught.value.code() == UNAVAILABLE
    wait_until(lambda: not ready.pools(), "its pool is gone", CALL_SECONDS)

    def serving() -> bool:
        return check(ready.running["gateway"], NAMES["gateway"]) == "SERVING"

    def found_loading() -> grpc.RpcError | None:
        """Return the refusal of an engine that loads its model; None where it had loaded it before the call."""
        ready.start("engine")
        engine = engine_pb2_grpc.EngineStub(ready.running["engine"].channel)
        try:
            engine.GetEngine(engine_pb2.GetEngineRequest(), timeout=CALL_SECONDS)
        except grpc.RpcError as loading:
            return loading
        ready.running["engine"].kill()
        wait_until(lambda: not serving(), "the gateway has lost it")
        return None

    loading = in_time(found_loading, "the engine is called while it loads its model")
    assert (loading.code(), loading.details()) == (UNAVAILABLE, "the engine is loading its model")
    wait_until(serving, "the gateway has a link to the new engine", CALL_SECONDS)
    assert ready.generate(100).token_ids == expected
    gateway.close()
