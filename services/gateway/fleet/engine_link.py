"""The gateway's one multiplexed stream to an engine."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import grpc

from quire.v1 import engine_pb2 as pb
from quire.v1 import engine_pb2_grpc as pb_grpc
from services.gateway.fleet.in_flight_requests import InFlightRequests
from services.gateway.fleet.load_estimate import CurrentLoad, LoadEstimate
from services.gateway.fleet.observer import FleetObserver
from services.gateway.fleet.request_stream import Event, RequestStream
from services.gateway.fleet.token_pacing import TokenPacing
from services.runtime import transport
from services.runtime.errors import (
    FIELD_METADATA,
    DeadlineExceeded,
    GenerationFailed,
    InvalidField,
    PinExists,
    PinTooLarge,
    ServiceError,
    Unavailable,
    UnknownPin,
)
from services.runtime.service import Readiness
from services.runtime.tls import ClientTLS

_DESCRIBE_SECONDS = 5.0
# Often at first: an engine that starts beside the gateway is used as soon as its model is loaded.
_RETRY_SECONDS = (0.1, *(0.2,) * 20, 0.4, 0.8, 1.6)
_EVENTS_PER_SLICE = 32

# Errors of Engine.Admin by status; other statuses are faults of the engine.
_ADMIN_ERRORS: dict[grpc.StatusCode, type[ServiceError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidField,
    grpc.StatusCode.NOT_FOUND: UnknownPin,
    grpc.StatusCode.ALREADY_EXISTS: PinExists,
    grpc.StatusCode.RESOURCE_EXHAUSTED: PinTooLarge,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
}

log = logging.getLogger("quire.gateway")


Connect = Callable[[str], AbstractAsyncContextManager["pb_grpc.EngineAsyncStub"]]


@dataclass(frozen=True)
class LinkOptions:
    """Options for all links of a gateway.

    A link without a message for `timeout_seconds` is closed. Recent load decays over `load_window_seconds`. At most
    `max_buffered_tokens` of a request stay unread. `connect` replaces the channel to an address.
    """

    timeout_seconds: float
    load_window_seconds: float
    tls: ClientTLS | None = None
    max_buffered_tokens: int = 4096
    pacing: TokenPacing = field(default_factory=TokenPacing)
    observer: FleetObserver = field(default_factory=FleetObserver)
    connect: "Connect | None" = None


class EngineListener(Protocol):
    """Receives an engine's description before any request is sent; raises Unavailable to reject the engine."""

    async def on_engine(self, description: pb.GetEngineResponse, stub: "pb_grpc.EngineAsyncStub") -> None:
        """Prepare for requests to the engine."""


class EngineLink:
    """Keeps a stream to one engine open and delivers its events to their requests."""

    def __init__(self, address: str, options: LinkOptions, listener: EngineListener, name: str = "") -> None:
        """`name` is the DNS name that the engine's certificate must have; `run` connects."""
        self.address = address
        self._tls = options.tls and options.tls.with_server_name(name)
        self._listener = listener
        self._connect = options.connect or self._open_channel
        self._timeout_seconds = options.timeout_seconds
        self._observer = options.observer
        self._requests = InFlightRequests(options.max_buffered_tokens, options.pacing)
        self._pacing = options.pacing
        self._description: pb.GetEngineResponse | None = None
        self._stub: pb_grpc.EngineAsyncStub | None = None
        self._request_blocks = 0
        self.draining = False
        self.without_kvmanager = False  # long enough that its requests fail
        self.load = LoadEstimate(options.load_window_seconds)
        self.sessions = 0  # connections so far
        self._failures = 0  # to connect, one after the other
        self._rejection = ""  # why the listener rejected the engine the last time
        self.readiness = Readiness()
        self._retired = False
        self._changed = asyncio.Event()

    @property
    def accepts_requests(self) -> bool:
        """Whether the engine is connected, has its KV manager, and neither it nor this link is draining."""
        return self.readiness.ready and not (self.draining or self.without_kvmanager or self._retired)

    def retire(self) -> None:
        """Accept no new requests; those in flight continue."""
        self._retired = True
        self._notify()

    async def changes(self) -> AsyncIterator[None]:
        """Yield now and whenever `accepts_requests`, `readiness` or `idle` may have changed."""
        while True:
            changed = self._changed
            yield
            await changed.wait()

    @property
    def idle(self) -> bool:
        """Whether no request of this gateway is in flight."""
        return not len(self._requests)

    @property
    def requests(self) -> int:
        """Count of this gateway's requests in flight, and other gateways' requests in the engine's latest report."""
        return len(self._requests) + self.load.requests_of_others

    def current_load(self) -> CurrentLoad:
        """Return the engine's load: its latest report, and what was sent since. Raises Unavailable."""
        description = self.description()
        held = max(0, description.device_blocks - self.load.available_blocks) * description.block_size
        return CurrentLoad(self.requests, self.load.waiting, held + self.load.pending_prefill_tokens)

    def description(self) -> pb.GetEngineResponse:
        """Return the engine's description. Raises Unavailable while disconnected."""
        if self._description is None:
            raise Unavailable(f"the engine at {self.address} is not connected")
        return self._description

    @property
    def request_blocks(self) -> int:
        """Maximum number of blocks of one request. Raises Unavailable while disconnected."""
        return self._request_blocks or self.description().device_blocks

    async def administer(self, request: pb.EngineAdminRequest, timeout: float) -> pb.EngineAdminResponse:
        """Call Engine.Admin; `timeout` is in seconds. Raises a ServiceError."""
        self.description()
        assert self._stub is not None, "set together with the description"
        try:
            response = await self._stub.Admin(request, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            kind = _ADMIN_ERRORS.get(error.code(), GenerationFailed)
            field = dict(error.trailing_metadata()).get(FIELD_METADATA, "")
            raise kind(error.details() or error.code().name, str(field)) from error
        self._request_blocks = response.request_blocks
        return response

    def submit(self, submission: pb.Submission) -> RequestStream:
        """Send a request to the engine. Raises RequestExists, or Unavailable while disconnected."""
        self.description()
        return self._requests.submit(submission)

    def cancel(self, stream: RequestStream, reason: pb.CancelReason.ValueType, sample: int | None = None) -> None:
        """Cancel a request or one of its samples at the engine; its RequestFinished still follows."""
        self._requests.cancel(stream, reason, sample)

    def release(self, stream: RequestStream) -> None:
        """Drop further events of a request; its id can be used again."""
        self._requests.release(stream, asyncio.get_running_loop().time())
        if self.idle:
            self._notify()

    async def run(self) -> None:
        """Connect, and reconnect after each disconnect, until cancelled."""
        while True:
            connected = await self._connect_once()
            self._failures = 0 if connected else self._failures + 1
            await asyncio.sleep(_RETRY_SECONDS[min(self._failures, len(_RETRY_SECONDS) - 1)])

    async def _connect_once(self) -> bool:
        """Run one session; return whether it was established."""
        try:
            async with self._connect(self.address) as stub:
                await self._run_session(stub)
        except grpc.aio.AioRpcError as error:
            log.log(self._disconnect_level(), "engine at %s: %s", self.address, error.details())
        except Unavailable as error:
            level = logging.DEBUG if str(error) == self._rejection else logging.WARNING  # retries repeat it
            self._rejection = str(error)
            log.log(level, "engine at %s is not used: %s", self.address, error)
        except TimeoutError:
            log.log(self._disconnect_level(), "engine at %s: no message for %s s", self.address, self._timeout_seconds)
        finally:
            connected = self.readiness.ready
            self.readiness.set(False)
            self._description = self._stub = None
            self._request_blocks = 0
            self.draining = self.without_kvmanager = False
            self.load.on_disconnected()
            self._requests.disconnect()
            self._notify()
        return connected

    @asynccontextmanager
    async def _open_channel(self, address: str) -> AsyncIterator["pb_grpc.EngineAsyncStub"]:
        async with transport.channel(address, tls=self._tls) as channel:
            yield pb_grpc.EngineStub(channel)

    def _disconnect_level(self) -> int:
        """Warn of a lost engine, and once of an address that stays without one; an engine may start later."""
        stays = self._failures == len(_RETRY_SECONDS)
        return logging.WARNING if self.readiness.ready or stays else logging.DEBUG

    async def _run_session(self, stub: "pb_grpc.EngineAsyncStub") -> None:
        description = await stub.GetEngine(pb.GetEngineRequest(), timeout=_DESCRIBE_SECONDS)
        await self._listener.on_engine(description, stub)
        self._description, self._stub = description, stub
        self.load.on_connected(description.device_blocks)
        call = stub.Serve(self._requests.outgoing())
        while True:
            async with asyncio.timeout(self._timeout_seconds):
                response = await call.read()
            if not isinstance(response, pb.ServeResponse):
                return
            self._pacing.on_step()
            self._update_state(response)
            if not self.readiness.ready:
                log.info("engine at %s serves %s", self.address, description.model)
                self.sessions += 1
                self._rejection = ""
                self.readiness.set(True)
                self._notify()
            await self._deliver(response.step)

    def _update_state(self, response: pb.ServeResponse) -> None:
        self._request_blocks = response.request_blocks
        self.load.on_report(response.load, len(self._requests))
        if response.draining and not self.draining:
            log.info("engine at %s is draining", self.address)
            self._notify()
        self.draining = response.draining
        if response.without_kvmanager != self.without_kvmanager:
            self.without_kvmanager = response.without_kvmanager
            state = (
                "has lost its KV manager and gets no requests" if self.without_kvmanager else "has its KV manager back"
            )
            log.warning("engine at %s %s", self.address, state)
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _deliver(self, step: pb.StepOutput) -> None:
        """Deliver the events of a step in slices, so that a new call does not wait for hundreds of streams."""
        if step.tokens:
            tokens = sum([len(one.token_ids) for one in step.tokens])
            self.load.recent.add(asyncio.get_running_loop().time(), tokens)
        events: Iterable[Event] = chain(step.started, step.prompts, step.tokens)
        for number, event in enumerate(events, start=1):
            self._requests.deliver(event, last=False)
            if number % _EVENTS_PER_SLICE == 0:
                await asyncio.sleep(0)
        ends: Iterable[Event] = chain(step.finished, step.refused)
        for end in ends:
            released_at = self._requests.deliver(end, last=True)
            if released_at is not None:
                engine, seconds = self.description(), asyncio.get_running_loop().time() - released_at
                self._observer.on_cancelled(engine.model, engine.engine_id, seconds)
