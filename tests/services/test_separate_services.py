"""The three services started one by one: health, reflection, and what happens when one goes away and comes back."""

import queue
import signal
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
from tests.load import prompt_request
from tests.running_quire import Answer, HealthWatch, RunningService
from tests.tiny_models import CONTEXT

NAMES = {"kvmanager": "quire.v1.KVManager", "engine": "quire.v1.Engine", "gateway": "quire.v1.Gateway"}
PATIENCE_SECONDS = 4
LINK_TIMEOUT_SECONDS = 3
LEASE_SECONDS = 1
MAX_SEQUENCES, MAX_WAITING = 4, 2
PROMPT = "Blocks of keys and values"
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

    def start_another(self, name: str, address: str) -> RunningService:
        return RunningService(name, "--listen", address, *self._arguments[name])

    def watch(self, name: str) -> HealthWatch:
        return HealthWatch(self.running[name].channel, NAMES[name])

    @property
    def gateway(self) -> gateway_pb2_grpc.GatewayStub:
        return gateway_pb2_grpc.GatewayStub(self.running["gateway"].channel)

    @property
    def kvmanager(self) -> kvmanager_pb2_grpc.KVManagerStub:
        return kvmanager_pb2_grpc.KVManagerStub(self.running["kvmanager"].channel)

    def generate(self, max_tokens: int = 5) -> Answer:
        return Answer.of(self.gateway.Generate(prompt_request(PROMPT, max_tokens), timeout=60))

    def live_sequences(self) -> int:
        return sum(pool.sequences for pool in self.kvmanager.ListPools(kvmanager_pb2.ListPoolsRequest()).pools)


class Stream:
    """A long generation that is read by a thread of its own."""

    def __init__(self, gateway: gateway_pb2_grpc.GatewayStub, request: gateway_pb2.GenerateRequest) -> None:
        self._call = gateway.Generate(request, timeout=60)
        self._first_delta = threading.Event()
        self._end: queue.SimpleQueue[Answer | grpc.RpcError] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def wait_for_delta(self) -> None:
        assert self._first_delta.wait(30)

    def end(self) -> Answer | grpc.RpcError:
        return self._end.get(timeout=60)

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
    statuses = [all_three.running[name].close() for name in ("gateway", "engine", "kvmanager")]
    assert statuses == [0, 0, 0]


@pytest.fixture(scope="module")
def ready(services: Services) -> Services:
    """All three, started in the wrong order: each waits for what it needs."""
    for name in ("gateway", "engine"):
        services.start(name)
    gateway, engine = services.watch("gateway"), services.watch("engine")
    assert (gateway.next(), engine.next()) == ("NOT_SERVING", "NOT_SERVING")
    assert gateway.next() == "SERVING", "the engine's model is loaded"
    services.start("kvmanager")
    assert engine.next() == "SERVING"
    gateway.close()
    engine.close()
    return services


@pytest.fixture(scope="module")
def expected(ready: Services) -> list[int]:
    """The tokens of a long answer when nothing happens."""
    return ready.generate(300).token_ids


def check(service: RunningService, name: str) -> str:
    stub: Any = health_pb2_grpc.HealthStub(service.channel)
    status = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10).status
    return health_pb2.HealthCheckResponse.ServingStatus.Name(status)


# Before anything else is there


def test_a_gateway_without_an_engine_lives_but_is_not_ready_and_refuses_at_once(services: Services) -> None:
    services.start("gateway")
    gateway = services.running["gateway"]
    assert (check(gateway, ""), check(gateway, NAMES["gateway"])) == ("SERVING", "NOT_SERVING")
    begun = time.monotonic()
    with pytest.raises(grpc.RpcError) as caught:
        services.generate()
    assert (caught.value.code(), caught.value.details()) == (
        UNAVAILABLE,
        "no engine is there yet",
    )
    assert time.monotonic() - begun < LINK_TIMEOUT_SECONDS
    assert gateway.close() == 0


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


def test_without_max_tokens_a_stream_goes_on_until_the_context_is_full(ready: Services) -> None:
    request = prompt_request("")
    request.prompt.token_ids.ids.extend([5] * (CONTEXT - 6))
    request.stopping.ClearField("max_tokens")
    answer = Answer.of(ready.gateway.Generate(request, timeout=60))
    assert answer.started.max_tokens == len(answer.token_ids) == 6


def test_a_full_queue_refuses_and_takes_again_when_a_place_is_free(ready: Services) -> None:
    calls = []
    for _ in range(MAX_SEQUENCES):
        calls.append(ready.gateway.Generate(prompt_request(PROMPT, 1500), timeout=60))
        assert next(calls[-1]).HasField("started")
    waiting = [ready.gateway.Generate(prompt_request(PROMPT, 3), timeout=60) for _ in range(MAX_WAITING)]
    ready.gateway.GetModel(gateway_pb2.GetModelRequest())  # when it is answered, those before it are in the queue
    with pytest.raises(grpc.RpcError) as caught:
        ready.generate()
    assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert str(MAX_WAITING) in caught.value.details()
    for call in calls:
        call.cancel()
    assert [len(Answer.of(call).token_ids) for call in waiting] == [3] * MAX_WAITING
    assert len(ready.generate().token_ids) == 5


# The KV manager goes away


def test_requests_survive_a_kv_manager_that_dies_and_comes_back(ready: Services, expected: list[int]) -> None:
    engine, other = ready.watch("engine"), ready.watch("engine")
    assert (engine.next(), other.next()) == ("SERVING", "SERVING")
    other.close()  # one watcher that leaves must not silence the others
    running = Stream(ready.gateway, prompt_request(PROMPT, 300))
    running.wait_for_delta()
    ready.running["kvmanager"].kill()
    assert engine.next() == "NOT_SERVING"
    new = Stream(ready.gateway, prompt_request(PROMPT, 300))
    ready.start("kvmanager")
    assert engine.next() == "SERVING"
    for stream in (running, new):
        end = stream.end()
        assert isinstance(end, Answer), end
        assert end.token_ids == expected
    engine.close()


def test_requests_fail_when_the_kv_manager_stays_away(ready: Services) -> None:
    engine = ready.watch("engine")
    assert engine.next() == "SERVING"
    running = Stream(ready.gateway, prompt_request(PROMPT, 1500))
    running.wait_for_delta()
    ready.running["kvmanager"].kill()
    begun = time.monotonic()
    failure = running.failure()
    waited = time.monotonic() - begun
    assert (failure.code(), failure.details()) == (
        UNAVAILABLE,
        f"the engine has been without its KV manager for more than {PATIENCE_SECONDS} s",
    )
    assert PATIENCE_SECONDS * 0.9 < waited < PATIENCE_SECONDS + 10
    begun = time.monotonic()
    with pytest.raises(grpc.RpcError) as caught:
        ready.generate()
    assert (caught.value.code(), time.monotonic() - begun < PATIENCE_SECONDS) == (UNAVAILABLE, True)
    ready.start("kvmanager")
    assert engine.next() == "NOT_SERVING"
    assert engine.next() == "SERVING"
    assert len(ready.generate().token_ids) == 5
    engine.close()


# The gateway goes away


def test_a_killed_gateways_requests_give_their_blocks_back(ready: Services, tmp_path: Path) -> None:
    second = ready.start_another("gateway", f"unix:{tmp_path}/second.sock")
    second.output.wait_for("gateway is ready")
    stream = Stream(gateway_pb2_grpc.GatewayStub(second.channel), prompt_request(PROMPT, 1900))
    stream.wait_for_delta()
    assert ready.live_sequences() == 1
    second.kill()
    assert stream.failure().code() == UNAVAILABLE
    deadline = time.monotonic() + 20
    while ready.live_sequences() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert ready.live_sequences() == 0
    second.channel.close()


# The engine goes away


def test_an_engine_that_stands_still_counts_as_gone_until_it_goes_on(ready: Services) -> None:
    gateway = ready.watch("gateway")
    assert gateway.next() == "SERVING"
    stream = Stream(ready.gateway, prompt_request(PROMPT, 1500))
    stream.wait_for_delta()
    ready.running["engine"].process.send_signal(signal.SIGSTOP)
    try:
        assert gateway.next(LINK_TIMEOUT_SECONDS + 5) == "NOT_SERVING"
        assert stream.failure().code() == UNAVAILABLE
    finally:
        ready.running["engine"].process.send_signal(signal.SIGCONT)
    assert gateway.next() == "SERVING"
    assert len(ready.generate().token_ids) == 5
    gateway.close()


def test_an_engine_that_dies_makes_the_gateway_refuse_at_once_until_there_is_a_new_one(
    ready: Services, expected: list[int]
) -> None:
    gateway = ready.watch("gateway")
    assert gateway.next() == "SERVING"
    stream = Stream(ready.gateway, prompt_request(PROMPT, 1500))
    stream.wait_for_delta()
    begun = time.monotonic()
    ready.running["engine"].kill()
    assert stream.failure().code() == UNAVAILABLE
    assert gateway.next() == "NOT_SERVING"
    with pytest.raises(grpc.RpcError) as caught:
        ready.generate()
    assert caught.value.code() == UNAVAILABLE
    assert time.monotonic() - begun < LINK_TIMEOUT_SECONDS
    while ready.kvmanager.ListPools(kvmanager_pb2.ListPoolsRequest()).pools:
        assert time.monotonic() - begun < LEASE_SECONDS + 10
    ready.start("engine")
    engine = engine_pb2_grpc.EngineStub(ready.running["engine"].channel)
    with pytest.raises(grpc.RpcError) as loading:
        engine.GetEngine(engine_pb2.GetEngineRequest())
    assert (loading.value.code(), loading.value.details()) == (UNAVAILABLE, "the model is being loaded")
    assert gateway.next() == "SERVING"
    assert ready.generate(300).token_ids == expected
    gateway.close()
