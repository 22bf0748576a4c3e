"""Audits of a live service with a damaged pool."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from prometheus_client import generate_latest

from kvmanager import PoolSpec
from quire.v1 import kvmanager_pb2 as pb
from quire.v1 import kvmanager_pb2_grpc as pb_grpc
from services.kvmanager import auditor
from services.kvmanager.metrics import KVManagerMetrics
from services.kvmanager.server import KVManagerService
from services.kvmanager.settings import KVManagerSettings
from services.runtime import transport
from services.wire.attach import register_message
from tests.scrape import Scrape
from tests.services.kvmanager.attach_stream import allocate, tables_of

SECONDS = 120
SPEC = PoolSpec("engine", 1, "fingerprint", 2, 20, model="model")


class Engine:
    """An engine's stream on the service's event loop."""

    def __init__(self, stub: pb_grpc.KVManagerStub) -> None:
        self._call = stub.Attach(timeout=SECONDS)
        self._steps = 0

    async def attach(self, spec: PoolSpec = SPEC) -> "Engine":
        await self._call.write(pb.PoolRequest(register=register_message(spec)))
        await self._call.write(pb.PoolRequest(report=pb.ReportPage(last=True)))
        await self._call.read()
        return self

    async def apply(self, **items: object) -> pb.StepResult:
        self._steps += 1
        await self._call.write(pb.PoolRequest(step=pb.Step(step=self._steps, **items)))
        return (await self._call.read()).result


@asynccontextmanager
async def running() -> AsyncIterator[tuple[KVManagerService, pb_grpc.KVManagerStub, KVManagerMetrics]]:
    metrics = KVManagerMetrics()
    service = KVManagerService(KVManagerSettings(listen="127.0.0.1:0", map_listen="", lease_seconds=0), metrics)
    address = await service.start()
    work = asyncio.ensure_future(service.run())
    try:
        async with transport.channel(address) as channel:
            yield service, pb_grpc.KVManagerStub(channel), metrics
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await service.stop()


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run audits without a pause between them."""
    monkeypatch.setattr(auditor, "_MIN_PAUSE_SECONDS", 0)
    monkeypatch.setattr(auditor, "_SLICE_PAUSE_SECONDS", 0)


@pytest.fixture
def at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the periodic audit, so that only requested audits find damage."""
    monkeypatch.setattr(auditor, "_MIN_PAUSE_SECONDS", 1000)


async def until_audited(service: KVManagerService) -> None:
    """Wait until a further audit has started and ended."""
    totals = service.manager.session("engine").totals
    wanted, deadline = totals.audits + 2, time.monotonic() + SECONDS
    while totals.audits < wanted:
        assert time.monotonic() < deadline, "no audit ran"
        await asyncio.sleep(0)


@pytest.mark.usefixtures("restless")
def test_damage_is_found_logged_with_its_history_counted_and_withheld(caplog: pytest.LogCaptureFixture) -> None:
    async def play() -> None:
        async with running() as (service, stub, metrics):
            engine = await Engine(stub).attach()
            await engine.apply(allocates=[allocate(1, [1] * 3)])
            await until_audited(service)
            service.manager.session("engine").pool.device.hold([2])  # without a holder
            await until_audited(service)
            result = await engine.apply(frees=[pb.Free(sequence=1, reason=pb.FREE_REASON_FINISHED)])
            assert list(result.withheld_blocks) == [2]
            assert (result.device.withheld, result.device.held) == (1, 0)
            shown = Scrape(generate_latest(metrics.registry).decode())
            assert shown.values("quire_kv_audit_violations_total", "engine") == {"engine": 3}
            assert shown.values("quire_kv_audits_total", "engine")["engine"] >= 2
            assert list((await stub.Audit(pb.AuditRequest(), timeout=SECONDS)).violations) == []
            assert len(tables_of(await engine.apply(allocates=[allocate(2, [1] * 3)]))) == 1

    with caplog.at_level(logging.ERROR, logger="quire.kvmanager"):
        asyncio.run(play())
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0] == (
        "audit of engine engine: saved is 1, but the tables give 0; last events of the block: none"
    ), "damage without a block"
    assert messages[2] == (
        "audit of engine engine: block 2 has reference count 2 but 1 holder; it is withheld; "
        "last events of the block: 2 (step 1, allocate of sequence 1, request 'request-1')"
    )
    assert len(messages) == 3


@pytest.mark.usefixtures("at_rest")
def test_requested_audits_run_one_after_the_other_and_return_their_violations() -> None:
    async def play() -> None:
        async with running() as (service, stub, _):
            engine = await Engine(stub).attach()
            await engine.apply(allocates=[allocate(1, [1] * 3)])
            session = service.manager.session("engine")
            session.pool.device.free.remove(9)
            calls = [stub.Audit(pb.AuditRequest(engine_id="engine"), timeout=SECONDS) for _ in range(20)]
            most = 0
            while not all(call.done() for call in calls):
                most = max(most, len(session.audits))
                await asyncio.sleep(0)
            answers = [list((await call).violations) for call in calls]
            assert sorted(answers)[-1] == ["block 9 is neither free nor cached, held or withheld"]
            assert sum(map(len, answers)) == 1
            assert most <= 1

    asyncio.run(play())


@pytest.mark.usefixtures("at_rest")
def test_a_cancelled_call_cancels_its_audit() -> None:
    async def play() -> None:
        async with running() as (service, stub, _):
            engine = await Engine(stub).attach(replace(SPEC, device_blocks=200_000))
            session = service.manager.session("engine")
            call = stub.Audit(pb.AuditRequest(), timeout=SECONDS)
            while not session.audits:
                assert not call.done()
                await asyncio.sleep(0.001)
            call.cancel()
            deadline = time.monotonic() + SECONDS
            while session.audits and time.monotonic() < deadline:
                await asyncio.sleep(0.01)
            assert session.audits == []
            assert (await engine.apply()).device.free == 200_000

    asyncio.run(play())
