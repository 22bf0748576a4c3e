"""The gateway's one multiplexed stream to an engine."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import grpc

from quire.v1 import engine_pb2 as pb
from quire.v1 import engine_pb2_grpc as pb_grpc
from services.gateway.fleet.in_flight_requests import InFlightRequests
from services.gateway.fleet.load_estimate import LoadEstimate
from services.gateway.fleet.observer import FleetObserver
from services.gateway.fleet.request_stream import Event, RequestStream
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
_RETRY_SECONDS = (0.1, 0.2, 0.4, 0.8, 1.6)
_HANDED_OVER_AT_ONCE = 32

# What Engine.Admin ends with; all else is the engine's fault.
_ADMIN_ERRORS: dict[grpc.StatusCode, type[ServiceError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidField,
    grpc.StatusCode.NOT_FOUND: UnknownPin,
    grpc.StatusCode.ALREADY_EXISTS: PinExists,
    grpc.StatusCode.RESOURCE_EXHAUSTED: PinTooLarge,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
}

log = logging.getLogger("quire.gateway")


@dataclass(frozen=True)
class LinkOptions:
    """How engines are reached and watched.

    One that says nothing for `timeout_seconds` counts as gone; its work is remembered for about `work_seconds`. So many
    tokens of a request may wait to be read. `observer` receives how long it takes to end a request.
    """

    timeout_seconds: float
    work_seconds: float
    tls: ClientTLS | None = None
    max_buffered_tokens: int = 4096
    observer: FleetObserver = field(default_factory=FleetObserver)


class EngineListener(Protocol):
    """Receives an engine's description before anything is sent to it, and may refuse it by raising Unavailable."""

    async def on_engine(self, description: pb.GetEngineResponse, stub: "pb_grpc.EngineAsyncStub") -> None:
        """Make ready what requests for the engine need."""


class EngineLink:
    """Keeps the stream to one engine, and hands its events to the requests concerned."""

    def __init__(self, address: str, options: LinkOptions, listener: EngineListener, name: str = "") -> None:
        """Remember where the engine is, and the host's name that its certificate has then; `run` connects."""
        self.address = address
        self._tls = options.tls and options.tls.with_server_name(name)
        self._listener = listener
        self._timeout_seconds = options.timeout_seconds
        self._observer = options.observer
        self._requests = InFlightRequests(options.max_buffered_tokens)
        self._description: pb.GetEngineResponse | None = None
        self._stub: pb_grpc.EngineAsyncStub | None = None
        self._request_blocks = 0
        self.draining = False
        self.without_kvmanager = False  # for so long that requests fail there
        self.work = LoadEstimate(options.work_seconds)
        self.sessions = 0  # how often the engine came up
        self._unused_for = ""  # why it was not used, when it was tried last
        self.readiness = Readiness()
        self._retired = False
        self._changed = asyncio.Event()

    @property
    def accepts_requests(self) -> bool:
        """Whether the engine is there with its KV manager, and neither it nor the link is about to go."""
        return self.readiness.ready and not (self.draining or self.without_kvmanager or self._retired)

    def retire(self) -> None:
        """Take no more requests; those that run go on."""
        self._retired = True
        self._notify()

    async def changes(self) -> AsyncIterator[None]:
        """Yield at once, and each time that `accepts_requests`, `readiness` or `idle` may have changed."""
        while True:
            changed = self._changed
            yield
            await changed.wait()

    @property
    def idle(self) -> bool:
        """Whether it has no request of this gateway."""
        return not len(self._requests)

    @property
    def requests(self) -> int:
        """Requests that the engine has: those of this gateway, and those of others when it last reported."""
        return len(self._requests) + self.work.requests_of_others

    def description(self) -> pb.GetEngineResponse:
        """Return the engine's description. Raises Unavailable while it is away."""
        if self._description is None:
            raise Unavailable(f"the engine at {self.address} is away")
        return self._description

    @property
    def request_blocks(self) -> int:
        """Blocks that one request can have at most. Raises Unavailable while the engine is away."""
        return self._request_blocks or self.description().device_blocks

    async def administer(self, request: pb.EngineAdminRequest, timeout: float) -> pb.EngineAdminResponse:
        """Change what the engine has pinned, within so many seconds. Raises a ServiceError."""
        self.description()
        assert self._stub is not None, "an engine that describes itself can be called"
        try:
            response = await self._stub.Admin(request, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            kind = _ADMIN_ERRORS.get(error.code(), GenerationFailed)
            field = dict(error.trailing_metadata()).get(FIELD_METADATA, "")
            raise kind(error.details() or error.code().name, str(field)) from error
        self._request_blocks = response.request_blocks
        return response

    def submit(self, submission: pb.Submission) -> RequestStream:
        """Give a request to the engine, as InFlightRequests does it. Raises Unavailable while the engine is away."""
        self.description()
        return self._requests.submit(submission)

    def cancel(self, ticket: RequestStream, reason: pb.CancelReason.ValueType, sample: int | None = None) -> None:
        """End a request at the engine, or one sample of it; its RequestFinished still comes."""
        self._requests.cancel(ticket, reason, sample)

    def forget(self, ticket: RequestStream) -> None:
        """Drop whatever else comes for a request; its id is free."""
        self._requests.forget(ticket, asyncio.get_running_loop().time())
        if self.idle:
            self._notify()

    async def run(self) -> None:
        """Connect, and connect again after each loss, until cancelled."""
        failures = 0
        while True:
            connected = await self._connect_once()
            failures = 0 if connected else failures + 1
            await asyncio.sleep(_RETRY_SECONDS[min(failures, len(_RETRY_SECONDS) - 1)])

    async def _connect_once(self) -> bool:
        """Hold one stream until it ends; return whether it was up."""
        try:
            async with transport.channel(self.address, tls=self._tls) as channel:
                await self._converse(pb_grpc.EngineStub(channel))
        except grpc.aio.AioRpcError as error:
            log.log(self._loss_level(), "engine at %s: %s", self.address, error.details())
        except Unavailable as error:
            level = logging.DEBUG if str(error) == self._unused_for else logging.WARNING  # it is tried every 1.6 s
            self._unused_for = str(error)
            log.log(level, "engine at %s is not used: %s", self.address, error)
        except TimeoutError:
            log.log(self._loss_level(), "engine at %s: no word for %s s", self.address, self._timeout_seconds)
        finally:
            was_up = self.readiness.ready
            self.readiness.set(False)
            self._description = self._stub = None
            self._request_blocks = 0
            self.draining = self.without_kvmanager = False
            self.work.end_session()
            self._requests.lose()
            self._notify()
        return was_up

    def _loss_level(self) -> int:
        return logging.WARNING if self.readiness.ready else logging.DEBUG

    async def _converse(self, stub: "pb_grpc.EngineAsyncStub") -> None:
        description = await stub.GetEngine(pb.GetEngineRequest(), timeout=_DESCRIBE_SECONDS)
        await self._listener.on_engine(description, stub)
        self._description, self._stub = description, stub
        self.work.begin_session(description.device_blocks)
        call = stub.Serve(self._requests.outgoing())
        while True:
            async with asyncio.timeout(self._timeout_seconds):
                response = await call.read()
            if not isinstance(response, pb.ServeResponse):
                return
            self._take_state(response)
            if not self.readiness.ready:
                log.info("engine at %s serves %s", self.address, description.model)
                self.sessions += 1
                self._unused_for = ""
                self.readiness.set(True)
                self._notify()
            await self._hand_out(response.step)

    def _take_state(self, response: pb.ServeResponse) -> None:
        self._request_blocks = response.request_blocks
        self.work.report(response.load, len(self._requests))
        if response.draining and not self.draining:
            log.info("engine at %s takes no more requests", self.address)
            self._notify()
        self.draining = response.draining
        if response.without_kvmanager != self.without_kvmanager:
            self.without_kvmanager = response.without_kvmanager
            state = (
                "is without its KV manager, and gets no requests" if self.without_kvmanager else "has its KV manager"
            )
            log.warning("engine at %s %s", self.address, state)
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _hand_out(self, step: pb.StepOutput) -> None:
        """Hand the events of a step over, a few at a time, so that a new call does not wait for hundreds of streams."""
        if step.tokens:
            tokens = sum(len(one.token_ids) for one in step.tokens)
            self.work.recent.add(asyncio.get_running_loop().time(), tokens)
        events: Iterable[Event] = chain(step.started, step.prompts, step.tokens)
        for number, event in enumerate(events, start=1):
            self._requests.deliver(event, last=False)
            if number % _HANDED_OVER_AT_ONCE == 0:
                await asyncio.sleep(0)
        ends: Iterable[Event] = chain(step.finished, step.refused)
        for end in ends:
            given_up_at = self._requests.deliver(end, last=True)
            if given_up_at is not None:
                engine, seconds = self.description(), asyncio.get_running_loop().time() - given_up_at
                self._observer.on_cancelled(engine.model, engine.engine_id, seconds)
