"""The server's side of the network: the product's handlers, and the context that they receive."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from inspect import isasyncgen
from typing import Any

import grpc

from services.runtime.interceptors import HandlerInterceptor
from simulation.event_loop import SimulatedLoop
from simulation.network.connections import Call, Status


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
        context = _ServerContext(call, handler.response_serializer)
        try:
            await _respond(handler, _requests(call, handler.request_deserializer), context)
            status = Status(grpc.StatusCode.OK)
        except grpc.aio.AbortError:
            assert context.status is not None, "abort sets it"
            status = context.status
        except asyncio.CancelledError:
            status = Status(grpc.StatusCode.CANCELLED)
        except Exception as error:
            self.loop.failures.append(f"a handler failed: {error!r}")
            status = Status(grpc.StatusCode.UNKNOWN, f"Unexpected {type(error)}: {error}")
        call.send_status(status)


class _ServerContext:
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


async def _respond(handler: Any, requests: AsyncIterator[Any], context: _ServerContext) -> None:
    streams = handler.request_streaming
    kinds = f"{'stream' if streams else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
    request = requests if streams else await anext(requests, None)
    if request is None:
        raise asyncio.CancelledError  # the connection broke before the request arrived
    answer = getattr(handler, kinds)(request, context)
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
