"""The client's side of the network: channels and calls with the interface of grpc.aio."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from simulation.event_loop import SimulatedLoop
from simulation.network.connections import Call, Connection, Network, Status

_UNREACHABLE = "failed to connect to all addresses"
_EXPIRED = Status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
_OK = grpc.StatusCode.OK


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
        if self._connection is not None:
            self._connection.close()

    def unary_unary(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        """Return a function that makes a call with one request and one response."""

        async def call(request: Any, timeout: float | None = None) -> Any:
            made = self._call(path, response_deserializer)
            made.send(request_serializer(request))
            made.half_close()
            if timeout is not None:
                self._loop.call_later(timeout, made.expire)
            response = await made.read()
            await made.raise_for_status()
            return response

        return call

    def unary_stream(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        """Return a function that makes a call with one request and a stream of responses."""

        def call(request: Any, timeout: float | None = None) -> "ClientCall":
            made = self._call(path, response_deserializer)
            made.send(request_serializer(request))
            made.half_close()
            if timeout is not None:
                self._loop.call_later(timeout, made.expire)
            return made

        return call

    def stream_stream(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        """Return a function that makes a call with two streams."""

        def call(requests: AsyncIterator[Any]) -> "ClientCall":
            made = self._call(path, response_deserializer)
            made.consume(requests, request_serializer)
            return made

        return call

    stream_unary = stream_stream  # which no service has, but the generated stub asks for it

    def _call(self, path: str, deserialize: Callable[[bytes], Any]) -> "ClientCall":
        if self._connection is None or self._connection.broken:
            self._connection = self._network.connect(self._loop, self._address)
        call = Call(self._connection, path) if self._connection is not None else None
        return ClientCall(call, self._loop, deserialize)


class ClientCall:
    """The client's end of a call, as grpc.aio's."""

    def __init__(self, call: Call | None, loop: SimulatedLoop, deserialize: Callable[[bytes], Any]) -> None:
        """Without a call, the server could not be reached."""
        self._call = call
        self._loop = loop
        self._deserialize = deserialize
        self._status = None if call else Status(grpc.StatusCode.UNAVAILABLE, _UNREACHABLE)
        self._sender: asyncio.Task[None] | None = None

    def send(self, data: bytes | None) -> None:
        """Send one request; None ends them."""
        if self._call:
            self._call.requests.send(data)

    def half_close(self) -> None:
        """End the requests."""
        self.send(None)

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

    def expire(self) -> None:
        """End the call because its deadline has passed."""
        if self._call:
            self._call.cancel(_EXPIRED)

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


def _error(status: Status) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(status.code, grpc.aio.Metadata(), grpc.aio.Metadata(*status.metadata), status.details)
