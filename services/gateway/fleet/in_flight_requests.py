"""The requests that one gateway has at one engine."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from quire.v1 import engine_pb2 as pb
from services.gateway.fleet.request_stream import Event, RequestStream
from services.runtime.errors import RequestExists


@dataclass(frozen=True)
class _GivenUp:
    """An attempt that nobody waits for, and when that was."""

    attempt: int
    at: float


class InFlightRequests:
    """Requests by id: those with a ticket, and those that were given up and whose end the engine has not sent yet.

    Of a ticket's request at most `max_buffered_tokens` wait to be read. Times are in seconds.
    """

    def __init__(self, max_buffered_tokens: int) -> None:
        self._max_buffered_tokens = max_buffered_tokens
        self._outgoing: asyncio.Queue[pb.ServeRequest] = asyncio.Queue()
        self._tickets: dict[str, RequestStream] = {}
        self._given_up: dict[str, _GivenUp] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    def submit(self, submission: pb.Submission) -> RequestStream:
        """Send a request; its attempt counts from where the last one of that id was given up. Raises RequestExists."""
        if submission.request_id in self._tickets:
            raise RequestExists(f"request_id {submission.request_id!r} is live", "request_id")
        if given_up := self._given_up.get(submission.request_id):
            submission.attempt = max(submission.attempt, given_up.attempt + 1)
        ticket = RequestStream(submission, self._max_buffered_tokens)
        self._tickets[submission.request_id] = ticket
        self._outgoing.put_nowait(pb.ServeRequest(submission=submission))
        return ticket

    def cancel(self, ticket: RequestStream, reason: pb.CancelReason.ValueType, sample: int | None = None) -> None:
        """End a request at the engine, or one sample of it; its RequestFinished still comes."""
        submission = ticket.submission
        if self._tickets.get(submission.request_id) is ticket:
            cancel = pb.Cancel(
                request_id=submission.request_id, attempt=submission.attempt, reason=reason, sample=sample
            )
            self._outgoing.put_nowait(pb.ServeRequest(cancel=cancel))

    def forget(self, ticket: RequestStream, now: float) -> None:
        """Drop whatever else comes for a request; its id is free."""
        request_id, attempt = ticket.submission.request_id, ticket.submission.attempt
        if self._tickets.get(request_id) is ticket:
            del self._tickets[request_id]
            if not ticket.ended:
                self._given_up[request_id] = _GivenUp(attempt, now)

    async def outgoing(self) -> AsyncIterator[pb.ServeRequest]:
        """Yield what to send until the link breaks, and never end."""
        outgoing = self._outgoing
        while True:
            yield await outgoing.get()

    def deliver(self, event: Event, *, last: bool) -> float | None:
        """Give an event to its ticket; return when its request was given up, if this is the end of one that was."""
        ticket = self._tickets.get(event.request_id)
        if ticket and ticket.submission.attempt == event.attempt:
            overrun = ticket.overrun
            ticket.put(event)
            ticket.ended = last
            if ticket.overrun and not overrun:
                self.cancel(ticket, pb.CANCEL_REASON_SLOW_CLIENT)
        elif last and (given_up := self._given_up.get(event.request_id)) and given_up.attempt == event.attempt:
            del self._given_up[event.request_id]
            return given_up.at
        return None

    def lose(self) -> None:
        """The link broke: nothing more comes for any of them, and what was not sent is dropped."""
        self._outgoing = asyncio.Queue()
        for ticket in self._tickets.values():
            ticket.lose()
        self._tickets.clear()
        self._given_up.clear()
