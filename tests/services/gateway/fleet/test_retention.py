"""A gateway drops its state of engines, tenants and models after they are gone."""

import asyncio
import gc
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import generate_latest
from prometheus_client.samples import Sample

from bench.loads.null_engine import NullOptions
from quire.v1 import decoding_pb2, gateway_pb2, gateway_pb2_grpc
from services.gateway import server
from services.gateway.access import tenants
from services.gateway.access.admission import AdmissionControl
from services.gateway.access.api_keys import TenantLimits
from services.gateway.access.callers import DEFAULT_ORIGIN, Caller, Origin
from services.gateway.access.tenants import Tenants
from services.gateway.fleet import engine_link, fleet
from services.gateway.fleet.discovery import ServiceAddresses
from services.gateway.fleet.engine_link import EngineLink, LinkOptions
from services.gateway.fleet.fleet import Fleet, ServedModel
from services.gateway.fleet.retention import MAX_RETAINED_MODELS, RETENTION_SECONDS, Retention
from services.gateway.observe import metrics, tenant_usage
from services.gateway.observe.metrics import GatewayMetrics
from services.gateway.observe.observer import Inventory, RequestInfo, RequestObserver, RequestProgress
from services.gateway.observe.tenant_usage import TenantUsage
from services.gateway.server import GatewayService
from services.gateway.settings import GatewaySettings
from services.gateway.text.tokenizer_store import TokenizerStore
from services.runtime import transport
from services.runtime.errors import Overloaded, RejectionReason, Unavailable, UnknownModel
from tests.load import prompt_request
from tests.running_quire import CALL_SECONDS
from tests.services.gateway.handler_in_process import MODEL, kv_manager, null_engine, running_service

OPTIONS = NullOptions(2048, 384, token_id=100, microseconds_per_token=0.0)
STOPPED = gateway_pb2.Finished(samples=[gateway_pb2.SampleFinish(reason=decoding_pb2.FINISH_REASON_STOP)])

# Retention.


@given(
    st.lists(st.tuples(st.sets(st.integers(0, 4)), st.sets(st.integers(0, 4)), st.integers(0, 3)), max_size=12),
    st.integers(0, 4),
    st.integers(0, 3),
)
def test_a_key_expires_after_its_time_or_when_too_many_are_absent(
    looks: list[tuple[set[int], set[int], int]], seconds: int, max_absent: int
) -> None:
    tried, now = Retention[int](seconds, max_absent=max_absent), 0
    since: dict[int, int] = {}
    for known, present, passed in looks:
        now += passed
        since = {key: since.get(key, now) for key in sorted(known - present)}
        expected = []
        while since and (len(since) > max_absent or min(since.values()) + seconds <= now):
            expected.append(min(since, key=since.__getitem__))
            del since[expected[-1]]
        assert tried.expired(sorted(known), present, now) == expected


# Series.


def lines(shown: GatewayMetrics, *words: str) -> list[bytes]:
    page = generate_latest(shown.registry).splitlines()
    return [line for line in page if not line.startswith(b"#") and all(word.encode() in line for word in words)]


def a_request(shown: GatewayMetrics, engine: str, model: str = MODEL) -> RequestObserver:
    one = shown.on_request(RequestInfo("r", model, DEFAULT_ORIGIN, 0.0))
    one.on_admitted("r")
    one.on_submitted(RequestProgress(1, engine_id=engine))
    return one


def serve(shown: GatewayMetrics, engine: str, model: str = MODEL) -> None:
    """Record each event that has a series of an engine or its model."""
    one = a_request(shown, engine, model)
    shown.on_routed(model, engine, "prefix", 7)
    one.on_tokens(0, 1, 0.1)
    shown.on_failover(model, engine, "lost")
    shown.on_cancelled(model, engine, 0.1)
    shown.on_rejected(model, RejectionReason.MAX_REQUESTS)
    one.on_deadline_exceeded(queued=True)
    one.on_slow_client()
    one.on_ended(STOPPED, 1.0)


def report(shown: GatewayMetrics, engines: set[tuple[str, str]], models: set[str], now: float) -> None:
    shown.on_inventory(Inventory(engines, models, set()), now)


def test_series_of_an_absent_engine_are_dropped_after_their_retention() -> None:
    shown = GatewayMetrics()
    for engine in ("old", "new"):
        serve(shown, engine)
    before = len(lines(shown, 'engine="old"'))
    report(shown, {(MODEL, "old"), (MODEL, "new")}, {MODEL}, 0.0)
    report(shown, {(MODEL, "new")}, {MODEL}, 100.0)
    report(shown, {(MODEL, "new")}, {MODEL}, 99.0 + RETENTION_SECONDS)
    assert len(lines(shown, 'engine="old"')) == before > 300
    report(shown, {(MODEL, "new")}, {MODEL}, 100.0 + RETENTION_SECONDS)
    assert lines(shown, "old") == []
    assert len(lines(shown, 'engine="new"')) == before


def test_series_stay_until_the_last_request_of_an_absent_engine_has_ended() -> None:
    shown = GatewayMetrics()
    request = a_request(shown, "a")
    report(shown, set(), {MODEL}, 0.0)
    report(shown, set(), {MODEL}, 2 * RETENTION_SECONDS)
    request.on_ended(STOPPED, 1.0)
    report(shown, set(), {MODEL}, 3 * RETENTION_SECONDS)
    (count,) = lines(shown, "quire_request_success_total", 'finished_reason="stop"')
    assert count.endswith(b" 1.0")
    report(shown, set(), {MODEL}, 4 * RETENTION_SECONDS)
    assert lines(shown, 'engine="a"') == []


def test_a_known_model_without_engines_counts_zero_usable_ones_until_it_is_dropped() -> None:
    shown = GatewayMetrics()
    for now, usable in enumerate(({}, {MODEL: 2, "other": 1}, {MODEL: 0, "other": 1}, {"other": 0})):
        shown.on_inventory(Inventory((), set(usable), set(), usable), float(now))
        found = {(sample.labels["model_name"], sample.value) for sample in usable_engines(shown)}
        assert found == set(usable.items())


def usable_engines(shown: GatewayMetrics) -> list[Sample]:
    return [
        sample
        for family in shown.registry.collect()
        for sample in family.samples
        if sample.name == "quire_usable_engines"
    ]


def test_series_of_an_unknown_model_are_dropped_and_those_without_a_model_stay() -> None:
    shown = GatewayMetrics()
    serve(shown, "a", "old")
    serve(shown, "a", "new")
    shown.on_rejected("", RejectionReason.UNAVAILABLE)
    report(shown, {("new", "a")}, {"new"}, 0.0)
    report(shown, {("new", "a")}, {"new"}, RETENTION_SECONDS)
    assert lines(shown, "old") == []
    assert len(lines(shown, "quire_admission_rejections_total", 'model_name=""')) == 1


# Other state.


def served(name: str) -> ServedModel:
    return ServedModel(name, name.encode(), cast(Any, None))


def test_models_without_engines_are_retained_up_to_a_number_unless_in_use() -> None:
    tried = Fleet(ServiceAddresses((), ()), 1.0, LinkOptions(1.0, 1.0))
    names = [f"{number:02}" for number in range(MAX_RETAINED_MODELS + 3)]
    for now, name in enumerate(names):
        tried._models[name] = served(name)
        tried.prune(now)
    assert sorted(tried.model_names()) == names[3:]
    tried._models["03"].in_flight = 1
    tried._models["last"] = served("last")
    tried.prune(99)
    assert sorted(tried.model_names()) == ["03", *names[4:], "last"]
    with pytest.raises(UnknownModel):
        tried.model("02")


def test_tokenizers_of_unknown_models_are_dropped() -> None:
    async def load() -> set[bytes]:
        store = TokenizerStore()
        for digest in (b"a", b"b"):
            store._loading[digest] = asyncio.create_task(asyncio.sleep(0, cast(Any, None)))
        await asyncio.gather(*store._loading.values())
        coming = store._loading[b"c"] = asyncio.create_task(asyncio.sleep(60, cast(Any, None)))
        store.prune({b"b"})
        coming.cancel()
        return set(store._loading)

    assert asyncio.run(load()) == {b"b", b"c"}


def test_a_models_limiter_is_dropped_with_it_unless_tokens_are_queued() -> None:
    admission = AdmissionControl(9, 9)
    places = [admission.admit(name, 5, 0.0) for name in ("a", "b", "c")]
    places[0].release(0.0)
    places[1].release(0.0)
    admission.retain_models({"b"})
    assert admission._tokens.keys() == {"b", "c"}
    assert admission.queued_tokens("c") == 5


def test_rejections_of_a_removed_tenant_are_dropped_after_their_retention() -> None:
    now = 0.0
    held = Tenants(lambda: now)
    limits = TenantLimits(max_concurrent_requests=1)
    held.set_limits({"a": limits, "b": limits})
    for tenant in ("a", "b"):
        with held.admitted(Caller(tenant), 1), suppress(Overloaded), held.admitted(Caller(tenant), 1):
            pass
    held.set_limits({"b": limits})
    held.prune(0.0)
    held.prune(RETENTION_SECONDS - 1)
    assert held.rejections == {"a": 1, "b": 1}
    held.prune(RETENTION_SECONDS)
    assert held.rejections == {"b": 1}


def test_usage_of_a_removed_tenant_is_dropped_after_its_last_request_and_retention() -> None:
    usage = TenantUsage()
    request = usage.on_request(RequestInfo("r", MODEL, Origin(Caller("a")), 0.0))
    request.on_submitted(RequestProgress(1))
    for now in (0.0, RETENTION_SECONDS):
        usage.on_inventory(Inventory((), {MODEL}, {""}), now)
    assert [one.running for one in usage.stats()] == [1]
    request.on_ended(STOPPED, RETENTION_SECONDS)
    usage.on_inventory(Inventory((), {MODEL}, {""}), 2 * RETENTION_SECONDS)
    assert [one.tenant for one in usage.stats()] == ["a"]
    usage.on_inventory(Inventory((), {MODEL}, {""}), 3 * RETENTION_SECONDS)
    assert usage.stats() == []


def test_a_rejected_engine_is_logged_once_for_each_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(engine_link, "_RETRY_SECONDS", (0.0,))
    reasons = iter(["a", "a", "a", "b", "b", "a"])

    class Refusing(EngineLink):
        async def _run_session(self, stub: object) -> None:
            if (reason := next(reasons, None)) is None:
                raise asyncio.CancelledError
            raise Unavailable(reason)

    async def try_often() -> None:
        link = Refusing(f"unix:{tmp_path}/nobody.sock", LinkOptions(1.0, 1.0), cast(Any, None))
        with suppress(asyncio.CancelledError):
            await link.run()

    asyncio.run(try_often())
    assert [one.getMessage().rpartition(": ")[2] for one in caplog.records] == ["a", "b", "a"]


def test_an_address_that_stays_without_an_engine_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_link, "_RETRY_SECONDS", (0.0, 0.0))

    class Counting(EngineLink):
        tries = iter(range(6))

        async def _connect_once(self) -> bool:
            if next(self.tries, None) is None:
                raise asyncio.CancelledError
            return await super()._connect_once()

    link = Counting(f"unix:{tmp_path}/nobody.sock", LinkOptions(1.0, 1.0), cast(Any, None))
    with suppress(asyncio.CancelledError):
        asyncio.run(link.run())
    (line,) = caplog.records
    assert line.getMessage().startswith(f"engine at {link.address}: failed to connect")


# All state, in a gateway whose engines are replaced one by one.

PROMPT = "Blocks of keys and values are kept like pages of memory, again and again, block after block."


def gateways_objects() -> Counter[str]:
    """Count the live objects of the gateway's and the histograms' classes."""
    gc.unfreeze()  # the KV manager freezes the collector when an engine attaches
    gc.collect()
    kinds = Counter(type(one) for one in gc.get_objects())
    return Counter(
        {
            kind.__qualname__: count
            for kind, count in kinds.items()
            if str(kind.__module__).startswith(
                ("services.gateway", "services.runtime.metrics.histograms", "prometheus_client")
            )
        }
    )


def test_ten_engines_in_turn_leave_no_series_and_no_objects(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for module in (metrics, tenants, tenant_usage):
        monkeypatch.setattr(module, "RETENTION_SECONDS", 0.0)
    monkeypatch.setattr(server, "_PRUNE_SECONDS", 0.02)
    monkeypatch.setattr(engine_link, "_RETRY_SECONDS", (0.01,))
    listed: asyncio.Queue[dict[str, str]] = asyncio.Queue()

    async def watch_addresses(*_: object) -> AsyncIterator[dict[str, str]]:
        while True:
            yield await listed.get()

    monkeypatch.setattr(fleet, "watch_addresses", watch_addresses)  # instead of a DNS server
    (tmp_path / "pinned.jsonl").write_text(json.dumps({"name": "greeting", "text": PROMPT}))
    shown = GatewayMetrics()

    async def replace_engines() -> list[tuple[int, Counter[str]]]:
        settings = GatewaySettings(
            listen=f"unix:{tmp_path}/gateway.sock",
            engines="dns:engines:1",
            http_listen="",
            pinned_prompts=str(tmp_path / "pinned.jsonl"),
        )
        gateway = GatewayService(settings, shown)
        sizes = []
        async with (
            running_service(gateway) as address,
            kv_manager(tmp_path),
            transport.channel(address) as channel,
        ):
            stub = gateway_pb2_grpc.GatewayStub(channel)
            for number in range(10):
                async with null_engine(tmp_path, tiny_model("llama"), f"engine-{number}", OPTIONS, device_blocks=64):
                    listed.put_nowait({f"unix:{tmp_path}/engine-{number}.sock": ""})
                    await gateway.readiness.wait()
                    await generate(stub)
                    await only(shown, f"engine-{number}")
                    await until(lambda: caplog.text.count("pinned 'greeting'") > number)  # noqa: B023
                    if number in (4, 9):
                        sizes.append((len(lines(shown)), gateways_objects()))
                    listed.put_nowait({})
                    async for ready in gateway.readiness.changes():
                        if not ready:
                            break
        return sizes

    (series_before, objects_before), (series, objects) = asyncio.run(replace_engines())
    assert series == series_before
    assert objects - objects_before == {}


async def generate(stub: gateway_pb2_grpc.GatewayStub) -> None:
    call = stub.Generate(prompt_request("Blocks of keys and values", 4), timeout=CALL_SECONDS)
    responses = [response async for response in call]
    assert responses[-1].finished.samples[0].reason == decoding_pb2.FINISH_REASON_LENGTH


async def only(shown: GatewayMetrics, name: str) -> None:
    """Wait until no other engine has series."""
    await until(lambda: len(lines(shown, "engine=")) == len(lines(shown, f'engine="{name}"')))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(CALL_SECONDS):
        while not condition():
            await asyncio.sleep(0.01)
