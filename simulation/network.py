"""A network of gRPC connections in memory: real messages and handlers, virtual delays, and cuts.

It has the part of grpc.aio that the services use, with the same order of events: messages of a stream arrive in order,
those of different streams in any order. Where a connection breaks, the messages under way are lost. The client's
call then fails with UNAVAILABLE. The server's handler first reads the end of the requests, as if they were
half-closed, and is cancelled a moment later.
"""

import asyncio
import heapq
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from inspect import isasyncgen
from itertools import count
from random import Random
from typing import Any, NamedTuple

import grpc

from services.runtime.interceptors import HandlerInterceptor
from simulation.event_loop import SimulatedLoop

_UNREACHABLE = "failed to connect to all addresses"
_BROKEN = "the connection was closed"
_NO_METADATA = grpc.aio.Metadata()
_OK = grpc.StatusCode.OK


class Latency(NamedTuple):
    """How long messages travel, in seconds: usually `usual` on average, and `late` for the share `late_share`."""

    usual: float = 0.0005
    late: float = 0.5
    late_share: float = 0.01


class Network:
    """All connections, and the deliveries under way. The simulator runs deliveries one at a time."""

    def __init__(self, clock: Callable[[], float], random: Random, latency: Latency) -> None:
        self._clock = clock
        self._random = random
        self._latency = latency
        self._deliveries: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._servers: dict[str, SimulatedServer] = {}
        self.connections: list[Connection] = []

    def listen(self, address: str, server: "SimulatedServer") -> None:
        """Serve calls to this address from now on, in place of an earlier server."""
        self._servers[address] = server

    def server_at(self, address: str) -> "SimulatedServer | None":
        """Return the server at an address, None if there is no living one."""
        server = self._servers.get(address)
        return None if server is None or server.loop.dead else server

    def deliver_after(self, earliest: float, action: Callable[[], None]) -> float:
        """Run an action after a random delay, but not before `earliest`; return its time."""
        at = max(earliest, self._clock() + self._delay())
        heapq.heappush(self._deliveries, (at, next(self._numbers), action))
        return at

    def deliver_in(self, seconds: float, action: Callable[[], None]) -> None:
        """Run an action after this time."""
        heapq.heappush(self._deliveries, (self._clock() + seconds, next(self._numbers), action))

    def next_delivery(self) -> float | None:
        """Return the time of the next delivery, if any."""
        return self._deliveries[0][0] if self._deliveries else None

    def deliver_one(self) -> None:
        """Run the next delivery."""
        heapq.heappop(self._deliveries)[2]()

    def open_connections(self, loop: SimulatedLoop | None = None) -> "Iterator[Connection]":
        """Yield the connections that are not broken; with `loop`, those that end at this process."""
        self.connections = [one for one in self.connections if not one.broken]
        return (one for one in self.connections if loop is None or loop in (one.client, one.server))

    def _delay(self) -> float:
        if self._random.random() < self._latency.late_share:
            return self._random.random() * self._latency.late
        return self._random.expovariate(1 / self._latency.usual)


class Connection:
    """A connection of a channel to a server, with its calls."""

    def __init__(self, network: Network, client: SimulatedLoop, service: "SimulatedServer") -> None:
        self.network = network
        self.client = client
        self.service = service
        self.server = service.loop
        self.broken = False
        self.silent = False  # what is sent is lost, and neither side knows
        self.calls: list[Call] = []

    def cut(self) -> None:
        """Break the connection: messages under way are lost, and both sides learn of it, one after the other."""
        if self.broken:
            return
        self.broken = True
        for call in self.calls:
            call.on_cut()


class Pipe:
    """The messages of one direction of a call, in order; None ends them. Its reader is on `loop`."""

    def __init__(self, connection: Connection, loop: SimulatedLoop) -> None:
        self._connection = connection
        self._loop = loop
        self._arrived: deque[Any] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._last = 0.0

    def send(self, message: Any) -> None:
        """Send a message. It is lost if the connection breaks before it arrives."""
        connection = self._connection
        if connection.broken or connection.silent:
            return
        self._last = connection.network.deliver_after(
            self._last, lambda: None if connection.broken or connection.silent else self.put(message)
        )

    def put(self, message: Any) -> None:
        """Let a message arrive now."""
        self._arrived.append(message)
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)

    async def get(self) -> Any:
        """Wait for the next message."""
        while not self._arrived:
            self._reader = self._loop.create_future()
            await self._reader
        return self._arrived.popleft()


class Status(NamedTuple):
    """How a call ended."""

    code: grpc.StatusCode
    details: str = ""
    metadata: tuple[tuple[str, str | bytes], ...] = ()


class Call:
    """A call on a connection: requests, responses, and the status, which follows the responses."""

    def __init__(self, connection: Connection, path: str) -> None:
        self.connection = connection
        self.requests = Pipe(connection, connection.server)
        self.responses = Pipe(connection, connection.client)
        self.handling: asyncio.Task[None] | None = None
        self.ended = False  # at the client
        connection.calls.append(self)
        connection.network.deliver_after(0, lambda: self._begin(path))

    def cancel(self) -> None:
        """End the call at the client; the server's handler is cancelled when it learns of it."""
        if not self.ended and not self.connection.client.dead:
            self.end(Status(grpc.StatusCode.CANCELLED, "Locally cancelled by application!"))
            if not self.connection.broken:
                self.connection.network.deliver_after(0, self._end_handler)

    def end(self, status: Status) -> None:
        """Let the status arrive at the client now, behind the responses that have arrived."""
        if not self.ended:
            self.ended = True
            self.responses.put(status)
            if self in self.connection.calls:
                self.connection.calls.remove(self)

    def on_cut(self) -> None:
        """Tell both sides that the connection is broken."""
        network = self.connection.network
        network.deliver_after(0, lambda: self.end(Status(grpc.StatusCode.UNAVAILABLE, _BROKEN)))
        network.deliver_after(0, self._end_handler)

    def _begin(self, path: str) -> None:
        connection = self.connection
        if not (connection.broken or connection.silent or connection.server.dead):
            self.handling = connection.service.handle(self, path)

    def _end_handler(self) -> None:
        task = self.handling
        if task is None or task.done() or self.connection.server.dead:
            return
        self.requests.put(None)
        self.connection.network.deliver_in(0.04 * self.connection.network._random.random(), task.cancel)  # noqa: SLF001


class SimulatedChannel:
    """A channel of a process to an address; the services' stubs make calls on it."""

    def __init__(self, network: Network, loop: SimulatedLoop, address: str) -> None:
        self._network = network
        self._loop = loop
        self._address = address
        self._connection: Connection | None = None

    async def __aenter__(self) -> "SimulatedChannel":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End all calls."""
        if self._connection is not None:
            for call in list(self._connection.calls):
                call.cancel()
            self._connection.broken = True

    def unary_unary(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        """Return a function that makes a call with one request and one response."""

        async def call(request: Any, timeout: float | None = None) -> Any:
            made = self._call(path, response_deserializer)
            made.send(request_serializer(request))
            made.half_close()
            try:
                async with asyncio.timeout(timeout):
                    response = await made.read()
                    await made.raise_for_status()
            except TimeoutError:
                made.cancel()
                raise _error(Status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")) from None
            return response

        return call

    def unary_stream(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        """Return a function that makes a call with one request and a stream of responses."""

        def call(request: Any, timeout: float | None = None) -> "ClientCall":
            del timeout
            made = self._call(path, response_deserializer)
            made.send(request_serializer(request))
            made.half_close()
            return made

        return call

    def stream_stream(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        """Return a function that makes a call with two streams."""

        def call(requests: AsyncIterator[Any]) -> "ClientCall":
            made = self._call(path, response_deserializer)
            made.consume(requests, request_serializer)
            return made

        return call

    stream_unary = stream_stream

    def _call(self, path: str, deserialize: Callable[[bytes], Any]) -> "ClientCall":
        connection = self._connection
        if connection is None or connection.broken:
            connection = self._connection = self._connect()
        if connection is None:
            return ClientCall(None, self._loop, deserialize)
        return ClientCall(Call(connection, path), self._loop, deserialize)

    def _connect(self) -> Connection | None:
        server = self._network.server_at(self._address)
        if server is None:
            return None
        connection = Connection(self._network, self._loop, server)
        self._network.connections.append(connection)
        return connection


class ClientCall:
    """The client's end of a call, as grpc.aio's."""

    def __init__(self, call: Call | None, loop: SimulatedLoop, deserialize: Callable[[bytes], Any]) -> None:
        """Without a call, the server could not be reached."""
        self._call = call
        self._loop = loop
        self._deserialize = deserialize
        self._status = None if call else Status(grpc.StatusCode.UNAVAILABLE, _UNREACHABLE)
        self._sender: asyncio.Task[None] | None = None

    def send(self, data: bytes) -> None:
        """Send one request."""
        if self._call:
            self._call.requests.send(data)

    def half_close(self) -> None:
        """End the requests."""
        self.send(None)  # type: ignore[arg-type]

    def consume(self, requests: AsyncIterator[Any], serialize: Callable[[Any], bytes]) -> None:
        """Send what an iterator yields."""

        async def send_all() -> None:
            async for request in requests:
                self.send(serialize(request))
            self.half_close()

        if self._call:
            self._sender = self._loop.create_task(send_all())

    async def read(self) -> Any:
        """Return the next response, grpc.aio.EOF at the end. Raises AioRpcError."""
        if self._status is None:
            assert self._call is not None, "a call that was not made has a status"
            try:
                found = await self._call.responses.get()
            except asyncio.CancelledError:
                self.cancel()
                raise
            if not isinstance(found, Status):
                return self._deserialize(found)
            self._end(found)
        await self.raise_for_status()
        return grpc.aio.EOF

    async def raise_for_status(self) -> None:
        """Wait for the end. Raises AioRpcError if it is not OK."""
        status = await self._ended()
        if status.code is not _OK:
            raise _error(status)

    async def code(self) -> grpc.StatusCode:
        """Wait for the end, and return the status."""
        return (await self._ended()).code

    async def details(self) -> str:
        """Wait for the end, and return its details."""
        return (await self._ended()).details

    def cancel(self) -> bool:
        """Cancel the call."""
        if self._call:
            self._call.cancel()
        return self._status is None

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._all()

    async def _all(self) -> AsyncIterator[Any]:
        while (response := await self.read()) is not grpc.aio.EOF:
            yield response

    async def _ended(self) -> Status:
        while self._status is None:
            assert self._call is not None, "a call that was not made has a status"
            found = await self._call.responses.get()
            if isinstance(found, Status):
                self._end(found)
        return self._status

    def _end(self, status: Status) -> None:
        self._status = status
        if self._sender is not None:
            self._sender.cancel()


class SimulatedServer:
    """Collects the handlers of services, as the generated code registers them, and runs them on a process's loop."""

    def __init__(self, loop: SimulatedLoop, interceptors: tuple[HandlerInterceptor, ...] = ()) -> None:
        self.loop = loop
        self._interceptors = interceptors
        self._handlers: dict[str, Any] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Do nothing: `add_registered_method_handlers` has them too."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Register the handlers of a service."""
        for method, handler in handlers.items():
            for interceptor in self._interceptors:
                if interceptor.service in ("", service):
                    handler = interceptor.wrap_handler(handler, method, None)
            self._handlers[f"/{service}/{method}"] = handler

    def handle(self, call: Call, path: str) -> "asyncio.Task[None]":
        """Run the handler of a call."""
        task = self.loop.create_task(self._handle(call, self._handlers[path]))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _handle(self, call: Call, handler: Any) -> None:
        context = ServerContext(call, handler.response_serializer)
        try:
            await _respond(handler, _requests(call, handler.request_deserializer), context)
            status = Status(_OK)
        except grpc.aio.AbortError:
            assert context.status is not None, "abort sets it"
            status = context.status
        except asyncio.CancelledError:
            status = Status(grpc.StatusCode.CANCELLED)
        except Exception as error:
            self.loop.failures.append(f"a handler failed: {error!r}")
            status = Status(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}")
        _send_status(call, status)


class ServerContext:
    """The part of a servicer's context that the services use."""

    def __init__(self, call: Call, serialize: Callable[[Any], bytes]) -> None:
        self._call = call
        self._serialize = serialize
        self.status: Status | None = None

    async def write(self, response: Any) -> None:
        """Send a response."""
        self._call.responses.send(self._serialize(response))

    async def abort(self, code: grpc.StatusCode, details: str = "", metadata: Any = ()) -> None:
        """End the call. Raises AbortError."""
        self.status = Status(code, details, tuple(metadata))
        raise grpc.aio.AbortError

    def invocation_metadata(self) -> tuple[()]:
        """Return no metadata."""
        return ()

    def peer(self) -> str:
        """Return a name of the client."""
        return "simulated"


async def _respond(handler: Any, requests: AsyncIterator[Any], context: ServerContext) -> None:
    streams = handler.request_streaming
    behaviour = getattr(
        handler, f"{'stream' if streams else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
    )
    answer = behaviour(requests if streams else await anext(requests), context)
    if not isasyncgen(answer):
        response = await answer
        if response is not None:
            await context.write(response)
        return
    try:
        async for response in answer:
            await context.write(response)
    finally:
        await answer.aclose()


async def _requests(call: Call, deserialize: Callable[[bytes], Any] | None) -> AsyncIterator[Any]:
    while (data := await call.requests.get()) is not None:
        yield deserialize(data) if deserialize else data


def _send_status(call: Call, status: Status) -> None:
    connection, pipe = call.connection, call.responses
    if connection.broken or connection.silent or connection.server.dead:
        return
    pipe._last = connection.network.deliver_after(  # noqa: SLF001
        pipe._last, lambda: None if connection.broken or connection.silent else call.end(status)  # noqa: SLF001
    )


def _error(status: Status) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(status.code, _NO_METADATA, grpc.aio.Metadata(*status.metadata), status.details)
