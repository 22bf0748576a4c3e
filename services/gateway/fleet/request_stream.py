"""The events that one request has received from its engine and its reader has not read yet."""

import asyncio
from dataclasses import dataclass, field

from quire.v1 import engine_pb2 as pb
from services.runtime.errors import SlowClient

Event = pb.RequestStarted | pb.PromptScores | pb.SampleTokens | pb.RequestFinished | pb.RequestRefused


class EngineDisconnected(Exception):
    """The link to the engine broke; its unsent events are lost."""


@dataclass(eq=False)
class RequestStream:
    """A submission and its unread events, in order.

    Unread tokens of the same sample are merged into one message. Above `max_tokens` unread tokens, all unread events
    are dropped and the stream has `overflowed`. Prompt scores do not count: they are bounded by the prompt.
    """

    submission: pb.Submission
    max_tokens: int
    ended: bool = False
    disconnected: bool = False
    overflowed: bool = False
    _unread: list[Event] = field(default_factory=list)
    _merging: dict[int, pb.SampleTokens] = field(default_factory=dict)  # the unread tokens by sample
    _tokens: int = 0
    _readable: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, event: Event) -> None:
        """Add an event. Never waits."""
        if self.overflowed:
            return
        if isinstance(event, pb.SampleTokens):
            self._put_tokens(event)
        else:
            self._unread.append(event)
        self._readable.set()

    def disconnect(self) -> None:
        """End the stream after its unread events, because the link broke."""
        self.disconnected = True
        self._readable.set()

    async def next_events(self, deadline: float | None) -> list[Event]:
        """Wait for events and return all unread ones.

        Raises SlowClient after an overflow, EngineDisconnected when no event can follow, and TimeoutError when the
        event loop's clock reaches `deadline`.
        """
        if not self._readable.is_set():
            async with asyncio.timeout_at(deadline):
                await self._readable.wait()
        if self.overflowed:
            raise SlowClient(f"the client left more than {self.max_tokens} tokens unread")
        if not self._unread:
            raise EngineDisconnected
        if not self.disconnected:  # a disconnected stream stays readable, to raise on the next call
            self._readable.clear()
        return self._take_unread()

    def _put_tokens(self, event: pb.SampleTokens) -> None:
        self._tokens += len(event.token_ids)
        if self._unread and self._tokens > self.max_tokens:
            self._take_unread()
            self.overflowed = True
        elif (merged := self._merging.get(event.sample)) is not None:
            merged.MergeFrom(event)
        else:
            self._merging[event.sample] = event
            self._unread.append(event)

    def _take_unread(self) -> list[Event]:
        unread, self._unread, self._merging, self._tokens = self._unread, [], {}, 0
        return unread
