"""Handshakes of engines: which one succeeds, how long they may last, and how a replaced stream ends."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc
import pytest

from blocks import Allocate, Step
from kvmanager import KVManager, PoolSpec
from quire.v1 import kvmanager_pb2 as pb
from quire.v1 import kvmanager_pb2_grpc
from services.engine.block_client import AttachRefused, BlockClient
from services.kvmanager.attach_handshake import USUAL, HandshakeLimits
from services.kvmanager.observer import PoolObserver
from services.kvmanager.raw_request_interceptor import RawRequestInterceptor
from services.kvmanager.recorder import OperationsRecorder
from services.kvmanager.servicer import KVManagerServicer
from services.runtime import transport
from services.wire.features import MANAGER_FEATURES
from services.wire.step_reader import read_step
from tests.services.kvmanager.attach_stream import register

pytestmark = pytest.mark.anyio

SHORT = HandshakeLimits(silence=0.2)
LAST = pb.PoolRequest(report=pb.ReportPage(last=True))


class Attach:
    """An engine's end of an Attach stream, on the event loop."""

    def __init__(self, stub: "kvmanager_pb2_grpc.KVManagerAsyncStub") -> None:
        self.call = stub.Attach()

    async def register(self, **fields: Any) -> "Attach":
        """Send it. A stream that is refused at once can end before that: see `refusal`."""
        with suppress(grpc.aio.AioRpcError):
            await self.call.write(pb.PoolRequest(register=register(**fields)))
        return self

    async def report(self) -> pb.PoolResponse:
        """Send an empty report, and return the answer. Raises grpc.RpcError."""
        await self.call.write(LAST)
        answer = await self.call.read()
        while isinstance(answer, pb.PoolResponse) and answer.HasField("attaching"):
            answer = await self.call.read()
        if not isinstance(answer, pb.PoolResponse):
            raise grpc.RpcError(await self.call.code(), await self.call.details())
        return answer

    async def refusal(self) -> tuple[grpc.StatusCode, str]:
        return await self.call.code(), await self.call.details()


@asynccontextmanager
async def serving(
    lease_seconds: float = 0.0, limits: HandshakeLimits = USUAL, **options: Any
) -> AsyncIterator[tuple[KVManager, Callable[[], Attach], str]]:
    """Yield a manager, a function that opens streams to its server, and the address of this."""
    manager = KVManager(1, **options)
    server = transport.server(transport.STEP_MESSAGE_BYTES, [RawRequestInterceptor()], transport.LINK_MESSAGE_BYTES)
    servicer = KVManagerServicer(
        manager,
        PoolObserver(),
        asyncio.get_running_loop().time,
        lease_seconds,
        OperationsRecorder("", 1),
        handshake_limits=limits,
    )
    kvmanager_pb2_grpc.add_KVManagerServicer_to_server(servicer, server)
    address = transport.bind(server, "127.0.0.1:0")
    await server.start()
    async with transport.channel(address) as channel:
        stub = kvmanager_pb2_grpc.KVManagerStub(channel)
        yield manager, lambda: Attach(stub), address  # type: ignore[arg-type]
    await server.stop(0)


async def registered(manager: KVManager, engine_id: str = "engine") -> None:
    """Wait until an engine's handshake has begun."""
    while engine_id not in manager._registered:
        await asyncio.sleep(0.001)


async def test_an_older_incarnation_is_refused_while_a_newer_one_attaches() -> None:
    async with serving() as (manager, stream, _):
        newer = await stream().register(incarnation=6)
        await registered(manager)
        code, details = await (await stream().register(incarnation=5)).refusal()
        assert code is grpc.StatusCode.ABORTED
        assert "older than the attaching 6" in details
        assert (await newer.report()).HasField("registered")
        assert manager.session("engine").pool.spec.incarnation == 6


async def test_a_newer_incarnation_ends_the_handshake_of_an_older_one() -> None:
    async with serving() as (manager, stream, _):
        older = await stream().register(incarnation=5)
        await registered(manager)
        newer = await stream().register(incarnation=6)
        assert (await newer.report()).HasField("registered")
        with pytest.raises(grpc.RpcError, match="ABORTED"):
            await older.report()


async def test_after_a_newer_handshake_failed_an_older_incarnation_attaches() -> None:
    async with serving() as (manager, stream, _):
        newer = await stream().register(incarnation=6)
        await registered(manager)
        newer.call.cancel()
        while manager._registered:
            await asyncio.sleep(0.001)
        assert (await (await stream().register(incarnation=5)).report()).HasField("registered")


async def test_a_replaced_session_learns_it_before_its_next_step() -> None:
    async with serving() as (_, stream, _):
        older = await stream().register(incarnation=5)
        await older.report()
        newer = await stream().register(incarnation=6)
        await newer.report()
        code, details = await asyncio.wait_for(older.refusal(), 10)
        assert code is grpc.StatusCode.ABORTED
        assert "was replaced" in details
        await newer.call.write(pb.PoolRequest(step=pb.Step(step=1)))
        assert (await newer.call.read()).result.step == 1


async def test_a_lease_does_not_end_during_a_handshake_of_its_incarnation() -> None:
    async with serving(lease_seconds=0.05) as (manager, stream, _):
        first = await stream().register()
        await first.report()
        held = manager.session("engine")
        again = await stream().register()
        await registered(manager)
        first.call.cancel()
        while held.connected:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.2)  # beyond the lease
        assert manager.find_session("engine") is held
        await again.report()
        assert manager.session("engine").totals is held.totals


async def test_a_lease_ends_after_the_handshake_of_its_incarnation_failed() -> None:
    async with serving(lease_seconds=0.05, limits=SHORT) as (manager, stream, _):
        first = await stream().register()
        await first.report()
        silent = await stream().register()
        await registered(manager)
        first.call.cancel()
        assert (await silent.refusal())[0] is grpc.StatusCode.UNAVAILABLE
        while manager.find_session("engine"):
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("registers", [True, False])
async def test_a_silent_handshake_ends(registers: bool) -> None:
    async with serving(limits=SHORT) as (manager, stream, _):
        silent = stream()
        if registers:
            await silent.register()
        code, details = await silent.refusal()
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "the engine sent nothing" in details
        assert not manager._registered


async def test_a_handshake_that_sends_slowly_ends_too() -> None:
    async with serving(limits=HandshakeLimits(silence=10, wait=0.3)) as (_, stream, _):
        slow = await stream().register(device_blocks=10_000)
        writing = asyncio.create_task(_write_slowly(slow))
        code, _ = await slow.refusal()
        assert code is grpc.StatusCode.UNAVAILABLE
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)


async def _write_slowly(stream: Attach) -> None:
    block = 0
    while True:
        await asyncio.sleep(0.02)
        block += 1
        await stream.call.write(pb.PoolRequest(report=pb.ReportPage(release_order=[block])))


async def test_silent_handshakes_leave_room_for_engines() -> None:
    async with serving(limits=HandshakeLimits(open=3, grace=0.1)) as (_, stream, _):
        silent = [await stream().register(engine_id=f"silent-{number}") for number in range(3)]
        await asyncio.sleep(0.3)
        for number in range(3):
            engine = await stream().register(engine_id=f"engine-{number}")
            assert (await engine.report()).HasField("registered")
        ended = [one for one in silent if one.call.done()]
        assert 1 <= len(ended) <= 3


async def test_too_many_handshakes_at_once_are_refused() -> None:
    async with serving(limits=HandshakeLimits(open=2)) as (manager, stream, _):
        for number in range(2):
            await stream().register(engine_id=f"engine-{number}")
            await registered(manager, f"engine-{number}")
        code, details = await (await stream().register(engine_id="one-more")).refusal()
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "2 engines are attaching" in details


async def test_all_pools_together_have_a_bound() -> None:
    async with serving(max_blocks=50) as (_, stream, _):
        first = await stream().register(engine_id="first", device_blocks=20, host_blocks=10)
        await first.report()
        code, details = await (await stream().register(engine_id="second", device_blocks=21)).refusal()
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "30 of at most 50 (max_blocks) are in use" in details
        again = await stream().register(engine_id="first", device_blocks=50)  # in place of its own pool
        assert (await again.report()).HasField("registered")
        code, details = await (await stream().register(engine_id="second", device_blocks=51)).refusal()
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert "device_blocks" in details


async def test_steps_are_answered_while_many_engines_attach() -> None:
    """Fifty handshakes take turns: between two answers of another engine there are few of their slices."""
    async with serving() as (manager, stream, _):
        engine = await stream().register(engine_id="engine")
        await engine.report()
        storm = [await stream().register(engine_id=f"e{number}", device_blocks=20_000) for number in range(50)]
        done = asyncio.gather(*(one.report() for one in storm))
        steps = 0
        while not done.done():
            steps += 1
            await engine.call.write(pb.PoolRequest(step=pb.Step(step=steps)))
            assert (await engine.call.read()).result.step == steps
        assert all(answer.HasField("registered") for answer in await done)
        assert len(manager.sessions()) == 51
        assert steps > 50


async def test_an_engine_refused_once_tries_again() -> None:
    async with serving() as (manager, stream, address):
        newer = await stream().register(incarnation=6)
        await registered(manager)
        client = BlockClient(address, PoolSpec("engine", 5, "m", 4, 20), lambda: None)
        running = asyncio.create_task(client.run())
        while not client._aborted:
            await asyncio.sleep(0.001)
        newer.call.cancel()
        await asyncio.wait_for(client.attached.wait(), 30)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_an_engine_refused_twice_ends() -> None:
    async with serving() as (manager, stream, address):
        newer = await stream().register(incarnation=6)
        await registered(manager)
        client = BlockClient(address, PoolSpec("engine", 5, "m", 4, 20), lambda: None)
        with pytest.raises(AttachRefused, match="older than the attaching 6"):
            await asyncio.wait_for(client.run(), 30)
        newer.call.cancel()


async def test_an_engine_ends_if_its_manager_lacks_what_it_needs() -> None:
    async with serving() as (_, _, address):
        client = BlockClient(address, PoolSpec("engine", 5, "m", 4, 20), lambda: None, needs=["step.merges"])
        with pytest.raises(AttachRefused, match=r'refused the pool: register\.needs has "step\.merges"'):
            await asyncio.wait_for(client.run(), 30)


async def test_an_engine_ends_if_its_manager_does_not_announce_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A manager of version 0.1.0 ignores what an engine needs, and announces nothing."""
    monkeypatch.setattr("services.wire.attach.MANAGER_FEATURES", ())
    monkeypatch.setattr("services.wire.attach.missing_features", lambda needs: [])
    async with serving() as (_, _, address):
        client = BlockClient(address, PoolSpec("engine", 5, "m", 4, 20), lambda: None, needs=["step.trims"])
        with pytest.raises(AttachRefused, match=r"lacks step\.trims: it is of an older version"):
            await asyncio.wait_for(client.run(), 30)


async def test_an_engine_leaves_out_what_its_manager_does_not_announce(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_prefix_of(request: bytes) -> str:
        return pb.PoolRequest.FromString(request).step.allocates[0].prefix_of

    def reading(data: bytes) -> Any:
        sent.append(first_prefix_of(data))
        return read_step(data)

    sent: list[str] = []
    monkeypatch.setattr("services.kvmanager.servicer.read_step", reading)
    for announced in (MANAGER_FEATURES, ()):
        monkeypatch.setattr("services.wire.attach.MANAGER_FEATURES", announced)
        async with serving() as (_, _, address):
            woken = asyncio.Event()
            client = BlockClient(address, PoolSpec("engine", 5, "m", 4, 20), woken.set)
            running = asyncio.create_task(client.run())
            await asyncio.wait_for(client.attached.wait(), 30)
            assert client.receive() is None
            woken.clear()
            client.send(Step(step=1, allocates=[Allocate(1, 1, "r", b"", array("i", [5]), 1, prefix_of="other")]))
            await asyncio.wait_for(woken.wait(), 30)
            answer = client.receive()
            assert answer is not None
            assert answer.step == 1
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    assert sent == ["other", ""]
