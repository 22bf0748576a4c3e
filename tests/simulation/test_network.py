"""The simulated network behaves as gRPC does: order, ends, cuts, and cancelled handlers."""

import asyncio
from collections.abc import AsyncIterator, Callable
from random import Random
from typing import Any

import grpc
import pytest

from quire.v1 import kvmanager_pb2 as pb
from quire.v1 import kvmanager_pb2_grpc as pb_grpc
from simulation.event_loop import SimulatedLoop
from simulation.network.channel import SimulatedChannel
from simulation.network.connections import Latency, Network
from simulation.network.server import SimulatedServer

ADDRESS = "kvmanager:1"


class _Servicer(pb_grpc.KVManagerServicer):
    """Answers each request of a stream, and records how the stream ends."""

    def __init__(self) -> None:
        self.ends: list[str] = []

    async def Attach(  # noqa: N802
        self, requests: AsyncIterator[pb.PoolRequest], context: Any
    ) -> AsyncIterator[pb.PoolResponse]:
        try:
            async for request in requests:
                if request.step.step == 99:
                    await context.abort(grpc.StatusCode.ABORTED, "enough")
                yield pb.PoolResponse(result=pb.StepResult(step=request.step.step))
            self.ends.append("half-closed")
            await asyncio.sleep(1.0)
        except asyncio.CancelledError:
            self.ends.append("cancelled")
            raise

    async def GetPool(self, request: pb.GetPoolRequest, _context: Any) -> pb.GetPoolResponse:  # noqa: N802
        response = pb.GetPoolResponse()
        response.pool.engine_id = request.engine_id
        return response


class _World:
    """A client and a server, and the time that passes for both."""

    def __init__(self) -> None:
        self.now = 0.0
        self.client = SimulatedLoop(lambda: self.now, "client")  # type: ignore[abstract]
        self.server = SimulatedLoop(lambda: self.now, "server")  # type: ignore[abstract]
        self.network = Network(lambda: self.now, Random(1), Latency(0.01, 0.1, 0.3))
        self.servicer = _Servicer()
        server = SimulatedServer(self.server)
        pb_grpc.add_KVManagerServicer_to_server(self.servicer, server)  # type: ignore[arg-type]
        self.network.listen(ADDRESS, server)

    def run(self, client: Callable[[Any], Any], until: float = 60.0) -> asyncio.Task[Any]:
        async def connected() -> Any:
            async with SimulatedChannel(self.network, self.client, ADDRESS) as channel:
                return await client(pb_grpc.KVManagerStub(channel))  # type: ignore[call-overload]

        task = self.client.run(lambda: self.client.create_task(connected()))
        self.pass_time(until)
        return task

    def pass_time(self, until: float) -> None:
        while True:
            for loop in (self.client, self.server):
                while loop.has_ready():
                    loop.run_one()
            times = [self.network.next_delivery(), self.client.next_timer(), self.server.next_timer()]
            soonest = min((one for one in times if one is not None), default=until)
            if soonest >= until:
                return
            self.now = max(self.now, soonest)
            if self.network.next_delivery() == soonest:
                self.network.deliver_one()


@pytest.fixture
def world() -> _World:
    return _World()


async def _steps(numbers: list[int]) -> AsyncIterator[pb.PoolRequest]:
    for number in numbers:
        yield pb.PoolRequest(step=pb.Step(step=number))


async def _all_results(stub: Any, numbers: list[int]) -> list[int]:
    return [response.result.step async for response in stub.Attach(_steps(numbers))]


def test_messages_of_a_stream_arrive_in_order_and_the_end_behind_them(world: _World) -> None:
    numbers = list(range(1, 30))
    assert world.run(lambda stub: _all_results(stub, numbers)).result() == numbers
    assert world.servicer.ends == ["half-closed"]


def test_a_call_with_one_request_has_one_response(world: _World) -> None:
    answer = world.run(lambda stub: stub.GetPool(pb.GetPoolRequest(engine_id="e"), timeout=5.0)).result()
    assert answer.pool.engine_id == "e"


def test_an_aborted_call_has_the_servers_status(world: _World) -> None:
    error = world.run(lambda stub: _all_results(stub, [1, 99])).exception()
    assert isinstance(error, grpc.aio.AioRpcError)
    assert (error.code(), error.details()) == (grpc.StatusCode.ABORTED, "enough")


def test_without_a_server_a_call_is_unavailable(world: _World) -> None:
    world.server.kill()
    error = world.run(lambda stub: _all_results(stub, [1])).exception()
    assert isinstance(error, grpc.aio.AioRpcError)
    assert error.code() is grpc.StatusCode.UNAVAILABLE


async def _held_open(stub: Any) -> list[int]:
    async def requests() -> AsyncIterator[pb.PoolRequest]:
        yield pb.PoolRequest(step=pb.Step(step=1))
        await asyncio.Event().wait()

    return [response.result.step async for response in stub.Attach(requests())]


def test_a_cut_connection_ends_both_sides_the_server_as_if_half_closed_then_cancelled(world: _World) -> None:
    task = world.run(_held_open, until=2.0)
    for connection in list(world.network.open_connections()):
        connection.cut()
    world.pass_time(4.0)
    error = task.exception()
    assert isinstance(error, grpc.aio.AioRpcError)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert world.servicer.ends == ["half-closed", "cancelled"]


def test_a_silent_connection_loses_messages_without_an_error(world: _World) -> None:
    task = world.run(_held_open, until=2.0)
    for connection in world.network.open_connections():
        connection.silence()
    world.pass_time(30.0)
    assert not task.done()
    assert world.servicer.ends == []


def test_a_silent_connection_carries_no_cancellation_until_it_breaks(world: _World) -> None:
    task = world.run(_held_open, until=2.0)
    connection = next(world.network.open_connections())
    connection.silence()
    world.client.run(task.cancel)
    world.pass_time(30.0)
    assert task.cancelled()
    assert world.servicer.ends == []
    connection.cut()
    world.pass_time(40.0)
    assert world.servicer.ends == ["half-closed", "cancelled"]


def test_a_connection_that_is_silent_before_a_cancellation_arrives_loses_it(world: _World) -> None:
    task = world.run(_held_open, until=2.0)
    connection = next(world.network.open_connections())
    world.client.run(task.cancel)
    while world.client.has_ready():
        world.client.run_one()
    connection.silence()
    world.pass_time(30.0)
    assert world.servicer.ends == []
    connection.cut()
    world.pass_time(40.0)
    assert world.servicer.ends == ["half-closed", "cancelled"]


async def _one_by_one(stub: Any, seen: list[int]) -> None:
    async def requests() -> AsyncIterator[pb.PoolRequest]:
        for number in range(1, 9):
            yield pb.PoolRequest(step=pb.Step(step=number))
            await asyncio.sleep(2.0)
        await asyncio.Event().wait()

    async for response in stub.Attach(requests()):
        seen.append(response.result.step)


def test_the_next_connection_of_a_client_can_be_silent_after_some_messages(world: _World) -> None:
    seen: list[int] = []
    world.network.on_next(world.client, lambda connection: setattr(connection, "messages_left", 5))
    task = world.run(lambda stub: _one_by_one(stub, seen), until=40.0)
    assert seen == [1, 2]
    assert not task.done()
    next(world.network.open_connections()).cut()
    world.pass_time(60.0)
    assert isinstance(task.exception(), grpc.aio.AioRpcError)


def test_a_cancelled_call_cancels_its_handler(world: _World) -> None:
    task = world.run(_held_open, until=2.0)
    world.client.run(task.cancel)
    world.pass_time(4.0)
    assert task.cancelled()
    assert world.servicer.ends == ["half-closed", "cancelled"]


def test_a_call_ends_at_its_deadline(world: _World) -> None:
    for connection in world.network.open_connections():
        connection.silence()

    async def ask(stub: Any) -> Any:
        call = asyncio.ensure_future(stub.GetPool(pb.GetPoolRequest(), timeout=1.0))
        await asyncio.sleep(0)
        next(world.network.open_connections()).silence()
        return await call

    error = world.run(ask).exception()
    assert isinstance(error, grpc.aio.AioRpcError)
    assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
