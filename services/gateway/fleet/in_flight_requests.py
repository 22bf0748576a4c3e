"""The requests that one gateway has in flight at one engine."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from quire.v1 import engine_pb2 as pb
from services.gateway.fleet.request_stream import Event, RequestStream
from services.gateway.fleet.token_pacing import TokenPacing
from services.runtime.errors import RequestExists


@dataclass(frozen=True)
class _Released:
    """An attempt that the gateway released at a time, and whose end the engine has not reported yet."""

    attempt: int
    at: float


class InFlightRequests:
    """Requests by id: those with a stream, and released ones whose end the engine has not reported yet.

    At most `max_buffered_tokens` of a request's tokens stay unread. Times are in seconds.
    """

    def __init__(self, max_buffered_tokens: int, pacing: TokenPacing | None = None) -> None:
        self._max_buffered_tokens = max_buffered_tokens
        self._pacing = pacing or TokenPacing()
        self._outgoing: asyncio.Queue[pb.ServeRequest | None] = asyncio.Queue()
        self._streams: dict[str, RequestStream] = {}
        self._released: dict[str, _Released] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def submit(self, submission: pb.Submission) -> RequestStream:
        """Send a request; its attempt number follows that of a released request of its id. Raises RequestExists."""
        if submission.request_id in self._streams:
            raise RequestExists(f"request_id {submission.request_id!r} is live", "request_id")
        if released := self._released.get(submission.request_id):
            submission.attempt = max(submission.attempt, released.attempt + 1)
        stream = RequestStream(submission, self._max_buffered_tokens, pacing=self._pacing)
        self._streams[submission.request_id] = stream
        self._outgoing.put_nowait(pb.ServeRequest(submission=submission))
        return stream

    def cancel(self, stream: RequestStream, reason: pb.CancelReason.ValueType, sample: int | None = None) -> None:
        """Cancel a request or one of its samples at the engine; its RequestFinished still follows."""
        submission = stream.submission
        if self._streams.get(submission.request_id) is stream:
            cancel = pb.Cancel(
                request_id=submission.request_id, attempt=submission.attempt, reason=reason, sample=sample
            )
            self._outgoing.put_nowait(pb.ServeRequest(cancel=cancel))

    def release(self, stream: RequestStream, now: float) -> None:
        """Drop further events of a request; its id can be used again."""
        stream.close()
        request_id, attempt = stream.submission.request_id, stream.submission.attempt
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            if not stream.ended:
                self._released[request_id] = _Released(attempt, now)

    async def outgoing(self) -> AsyncIterator[pb.ServeRequest]:
        """Yield the messages to send over the current link, until it breaks."""
        outgoing = self._outgoing
        while (message := await outgoing.get()) is not None:
            yield message

    def deliver(self, event: Event, *, last: bool) -> float | None:
        """Put an event into its stream. Return the time of release if this is the end of a released request."""
        stream = self._streams.get(event.request_id)
        if stream and stream.submission.attempt == event.attempt:
            overflowed = stream.overflowed
            stream.put(event)
            stream.ended = last
            if stream.overflowed and not overflowed:
                self.cancel(stream, pb.CANCEL_REASON_SLOW_CLIENT)
        elif last and (released := self._released.get(event.request_id)) and released.attempt == event.attempt:
            del self._released[event.request_id]
            return released.at
        return None

    def disconnect(self) -> None:
        """End all streams, and drop unsent messages, because the link broke."""
        self._outgoing.put_nowait(None)  # grpc would wait for messages forever
        self._outgoing = asyncio.Queue()
        for stream in self._streams.values():
            stream.disconnect()
        self._streams.clear()
        self._released.clear()
