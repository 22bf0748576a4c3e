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
from services.gateway.fleet.prefixes import SentPrefixes
from services.gateway.fleet.routing import RecentWork
from services.gateway.observer import GatewayObserver
from services.runtime import transport
from services.runtime.errors import (
    FIELD_METADATA,
    DeadlinePassed,
    GenerationFailed,
    InvalidField,
    PinExists,
    PinTooLarge,
    RequestIsLive,
    ServiceError,
    SlowClient,
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
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlinePassed,
}

log = logging.getLogger("quire.gateway")

Event = pb.RequestStarted | pb.PromptScores | pb.SampleTokens | pb.RequestFinished | pb.RequestRefused


class LinkBroke(Exception):
    """The link to the engine broke; whatever it had for a request is lost."""


@dataclass(eq=False)
class Ticket:
    """A request given to the engine, and what came back for it and was not read yet, in order.

    While its reader is behind, the tokens of a sample become one message. `most_tokens` may wait; when there are more,
    they are dropped, and the ticket is `overrun`. Scores of a prompt do not count: they are no more than its tokens.
    """

    submission: pb.Submission
    most_tokens: int
    ended: bool = False
    lost: bool = False
    overrun: bool = False
    _waiting: list[Event] = field(default_factory=list)
    _growing: dict[int, pb.SampleTokens] = field(default_factory=dict)  # those among them, by sample
    _tokens: int = 0
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, event: Event) -> None:
        """Add news. Never waits."""
        if self.overrun:
            return
        if isinstance(event, pb.SampleTokens):
            self._put_tokens(event)
        else:
            self._waiting.append(event)
        self._news.set()

    def lose(self) -> None:
        """The link broke: nothing more comes."""
        self.lost = True
        self._news.set()

    async def next_events(self, deadline: float | None) -> list[Event]:
        """Wait for news and return all that is there.

        Raises SlowClient when too much waited, LinkBroke when nothing more can come, TimeoutError when the event loop's
        clock reaches `deadline`.
        """
        if not self._news.is_set():
            async with asyncio.timeout_at(deadline):
                await self._news.wait()
        if self.overrun:
            raise SlowClient(f"more than {self.most_tokens} tokens waited for being read")
        if not self._waiting:
            raise LinkBroke
        if not self.lost:  # else what came before counts
            self._news.clear()
        return self._take()

    def _put_tokens(self, event: pb.SampleTokens) -> None:
        self._tokens += len(event.token_ids)
        if self._waiting and self._tokens > self.most_tokens:
            self._take()
            self.overrun = True
        elif (growing := self._growing.get(event.sample)) is not None:
            growing.MergeFrom(event)
        else:
            self._growing[event.sample] = event
            self._waiting.append(event)

    def _take(self) -> list[Event]:
        waiting, self._waiting, self._growing, self._tokens = self._waiting, [], {}, 0
        return waiting


@dataclass(frozen=True)
class _GivenUp:
    """An attempt that nobody waits for, and when that was."""

    attempt: int
    at: float


@dataclass(frozen=True)
class LinkOptions:
    """How engines are reached and watched.

    One that says nothing for `timeout_seconds` counts as gone; its work is remembered for about `work_seconds`. So many
    tokens of a request may wait to be read. `observer` hears how long it takes to end a request.
    """

    timeout_seconds: float
    work_seconds: float
    tls: ClientTLS | None = None
    max_buffered_tokens: int = 4096
    observer: GatewayObserver = field(default_factory=GatewayObserver)


class EngineListener(Protocol):
    """Hears of an engine before anything is asked of it, and may refuse it by raising Unavailable."""

    async def greet(self, description: pb.GetEngineResponse, stub: "pb_grpc.EngineAsyncStub") -> None:
        """Make ready what requests for the engine need."""


class EngineLink:
    """Keeps the stream to one engine, and hands what it says to the requests concerned."""

    def __init__(self, address: str, options: LinkOptions, listener: EngineListener, name: str = "") -> None:
        """Remember where the engine is, and the host's name that its certificate has then; `run` connects."""
        self.address = address
        self._tls = options.tls and options.tls.named(name)
        self._greeter = listener
        self._timeout_seconds = options.timeout_seconds
        self._max_buffered_tokens = options.max_buffered_tokens
        self._observer = options.observer
        self._outgoing: asyncio.Queue[pb.ServeRequest] = asyncio.Queue()
        self._tickets: dict[str, Ticket] = {}
        self._given_up: dict[str, _GivenUp] = {}  # whose end the engine has not told yet, by request id
        self._description: pb.GetEngineResponse | None = None
        self._stub: pb_grpc.EngineAsyncStub | None = None
        self._request_blocks = 0
        self._load = pb.EngineLoad()
        self._given_tokens = 0
        self._requests_of_others = 0
        self.draining = False
        self.without_kvmanager = False  # for so long that requests fail there
        self.work = RecentWork(options.work_seconds)
        self.sent = SentPrefixes(0)
        self.sessions = 0  # how often the engine came up
        self._unused_for = ""  # why it was not used, when it was tried last
        self.readiness = Readiness()
        self._retired = False
        self._changed = asyncio.Event()

    @property
    def takes_requests(self) -> bool:
        """Whether the engine is there with its KV manager, and neither it nor the link is about to go."""
        return self.readiness.ready and not (self.draining or self.without_kvmanager or self._retired)

    def retire(self) -> None:
        """Take no more requests; those that run go on."""
        self._retired = True
        self._tell_change()

    async def changes(self) -> AsyncIterator[None]:
        """Yield at once, and each time that `takes_requests`, `readiness` or `idle` may have changed."""
        while True:
            changed = self._changed
            yield
            await changed.wait()

    @property
    def idle(self) -> bool:
        """Whether it has no request of this gateway."""
        return not self._tickets

    @property
    def requests(self) -> int:
        """Requests that the engine has: those of this gateway, and those of others when it last said so."""
        return len(self._tickets) + self._requests_of_others

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens that the engine had still to compute when it last said so, and those it was given since."""
        return self._load.prompt_tokens + self._given_tokens

    def give_work(self, now: float, tokens: int) -> None:
        """Count so many prompt tokens as given to the engine. `now` is in seconds."""
        self.work.add(now, tokens)
        self._given_tokens += tokens

    def description(self) -> pb.GetEngineResponse:
        """Return what the engine says of itself. Raises Unavailable while it is away."""
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

    def submit(self, submission: pb.Submission) -> Ticket:
        """Give a request to the engine; its attempt counts from where the last one of that id here was given up.

        Raises Unavailable while the engine is away, RequestIsLive when the id is in use.
        """
        self.description()
        if submission.request_id in self._tickets:
            raise RequestIsLive(f"request_id {submission.request_id!r} is live", "request_id")
        if given_up := self._given_up.get(submission.request_id):
            submission.attempt = max(submission.attempt, given_up.attempt + 1)
        ticket = Ticket(submission, self._max_buffered_tokens)
        self._tickets[submission.request_id] = ticket
        self._outgoing.put_nowait(pb.ServeRequest(submission=submission))
        return ticket

    def cancel(self, ticket: Ticket, reason: pb.CancelReason.ValueType, sample: int | None = None) -> None:
        """End a request at the engine, or one sample of it; its RequestFinished still comes."""
        submission = ticket.submission
        if self._tickets.get(submission.request_id) is ticket:
            cancel = pb.Cancel(
                request_id=submission.request_id, attempt=submission.attempt, reason=reason, sample=sample
            )
            self._outgoing.put_nowait(pb.ServeRequest(cancel=cancel))

    def forget(self, ticket: Ticket) -> None:
        """Drop whatever else comes for a request; its id is free."""
        request_id, attempt = ticket.submission.request_id, ticket.submission.attempt
        if self._tickets.get(request_id) is ticket:
            del self._tickets[request_id]
            if not ticket.ended:
                self._given_up[request_id] = _GivenUp(attempt, asyncio.get_running_loop().time())
        if not self._tickets:
            self._tell_change()

    async def run(self) -> None:
        """Connect, and connect again after each loss, until cancelled."""
        failures = 0
        while True:
            connected = await self._connect_once()
            failures = 0 if connected else failures + 1
            await asyncio.sleep(_RETRY_SECONDS[min(failures, len(_RETRY_SECONDS) - 1)])

    async def _connect_once(self) -> bool:
        """Hold one stream until it ends; return whether it was up."""
        self._outgoing = asyncio.Queue()
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
            self._request_blocks = self._requests_of_others = 0
            self._load, self.draining, self.without_kvmanager = pb.EngineLoad(), False, False
            self._lose_tickets()
            self._tell_change()
        return was_up

    def _loss_level(self) -> int:
        return logging.WARNING if self.readiness.ready else logging.DEBUG

    async def _converse(self, stub: "pb_grpc.EngineAsyncStub") -> None:
        description = await stub.GetEngine(pb.GetEngineRequest(), timeout=_DESCRIBE_SECONDS)
        await self._greeter.greet(description, stub)
        self._description, self._stub = description, stub
        self.sent = SentPrefixes(description.device_blocks)
        call = stub.Serve(self._requests())
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
                self._tell_change()
            await self._hand_out(response.step)

    async def _requests(self) -> AsyncIterator[pb.ServeRequest]:
        outgoing = self._outgoing
        while True:
            yield await outgoing.get()

    def _take_state(self, response: pb.ServeResponse) -> None:
        self._request_blocks = response.request_blocks
        self._load, self._given_tokens = response.load, 0
        self._requests_of_others = max(0, response.load.running + response.load.waiting - len(self._tickets))
        if response.draining and not self.draining:
            log.info("engine at %s takes no more requests", self.address)
            self._tell_change()
        self.draining = response.draining
        if response.without_kvmanager != self.without_kvmanager:
            self.without_kvmanager = response.without_kvmanager
            told = "is without its KV manager, and gets no requests" if self.without_kvmanager else "has its KV manager"
            log.warning("engine at %s %s", self.address, told)
            self._tell_change()

    def _tell_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _hand_out(self, step: pb.StepOutput) -> None:
        """Hand the news of a step over, a few at a time, so that a new call does not wait for hundreds of streams."""
        if step.tokens:
            self.work.add(asyncio.get_running_loop().time(), sum(len(one.token_ids) for one in step.tokens))
        news: Iterable[Event] = chain(step.started, step.prompts, step.tokens)
        for number, event in enumerate(news, start=1):
            self._hand_over(event, last=False)
            if number % _HANDED_OVER_AT_ONCE == 0:
                await asyncio.sleep(0)
        ends: Iterable[Event] = chain(step.finished, step.refused)
        for end in ends:
            self._hand_over(end, last=True)

    def _hand_over(self, event: Event, *, last: bool) -> None:
        ticket = self._tickets.get(event.request_id)
        if ticket and ticket.submission.attempt == event.attempt:
            overrun = ticket.overrun
            ticket.put(event)
            ticket.ended = last
            if ticket.overrun and not overrun:
                self.cancel(ticket, pb.CANCEL_REASON_SLOW_CLIENT)
        elif last:
            self._note_end(event)

    def _note_end(self, event: Event) -> None:
        """Note the end of a request that nobody waits for."""
        given_up = self._given_up.get(event.request_id)
        if given_up and given_up.attempt == event.attempt:
            del self._given_up[event.request_id]
            engine, seconds = self.description(), asyncio.get_running_loop().time() - given_up.at
            self._observer.cancelled(engine.model, engine.engine_id, seconds)

    def _lose_tickets(self) -> None:
        for ticket in self._tickets.values():
            ticket.lose()
        self._tickets.clear()
        self._given_up.clear()
