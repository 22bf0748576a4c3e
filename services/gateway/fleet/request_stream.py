"""The events that one request has received from its engine and its reader has not read yet."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.v1 import engine_pb2 as pb
from services.gateway.fleet.token_pacing import TokenPacing
from services.runtime.errors import SlowClient

TokenReceiver = Callable[[pb.SampleTokens], bool]
Event = pb.RequestStarted | pb.PromptScores | pb.SampleTokens | pb.RequestFinished | pb.RequestRefused


class EngineDisconnected(Exception):
    """The link to the engine broke; its unsent events are lost."""


@dataclass(eq=False)
class RequestStream:
    """A submission and its unread events, in order, for one reader.

    Unread tokens of the same sample are merged into one message. Above `max_tokens` unread tokens, all unread events
    are dropped and the stream has `overflowed`. Prompt scores do not count: they are bounded by the prompt.

    While the reader waits, tokens are given to `receiver`, which returns False for those that the reader should read.
    `pacing` may hold tokens that follow others and do not end their sample.
    """

    submission: pb.Submission
    max_tokens: int
    ended: bool = False
    disconnected: bool = False
    overflowed: bool = False
    receiver: TokenReceiver | None = None
    pacing: TokenPacing = field(default_factory=TokenPacing)
    _unread: list[Event] = field(default_factory=list)
    _merging: dict[int, pb.SampleTokens] = field(default_factory=dict)  # the unread tokens by sample
    _tokens: int = 0
    _reader: asyncio.Future[None] | None = None  # set while the reader waits
    _timer: asyncio.TimerHandle | None = None  # one for all waits, because a timeout for each costs more than the wait
    _expired: bool = False
    _error: Exception | None = None  # of the receiver
    _is_held: bool = False  # all that is unread
    _handed_out_at: float = -math.inf  # the tokens before, if the pacing is active

    def put(self, event: Event) -> None:
        """Add an event. Never waits."""
        if self.overflowed:
            return
        if not isinstance(event, pb.SampleTokens):
            self._unread.append(event)
            self._release()
            self._wake()
        elif self.pacing.active or self._unread:
            self._put_paced(event)
        elif not self._is_received(event):
            self._put_tokens(event)
            self._wake()

    def hand_out(self) -> None:
        """Give unread tokens to the receiver, or let the reader read them."""
        self._release()
        if self.pacing.active:
            self._handed_out_at = self.pacing.now()
        if self._is_one_received():
            self._take_unread()
        else:
            self._wake()

    def disconnect(self) -> None:
        """End the stream after its unread events, because the link broke."""
        self.disconnected = True
        self._wake()

    def close(self) -> None:
        """Cancel the timers; nothing is read any more."""
        self._release()
        if self._timer is not None:
            self._timer.cancel()

    async def next_events(self, deadline: float | None) -> list[Event]:
        """Wait for events and return all unread ones. `deadline` must be the same in all calls.

        Raises SlowClient after an overflow, EngineDisconnected when no event can follow, and TimeoutError when the
        event loop's clock reaches `deadline`.
        """
        while not (self._is_readable() or self.disconnected or self.overflowed):
            if self._error is not None:
                raise self._error
            if self._expired:
                raise TimeoutError
            await self._start_wait(deadline)
        if self.overflowed:
            raise SlowClient(f"the client left more than {self.max_tokens} tokens unread")
        if not self._unread:
            raise EngineDisconnected
        return self._take_unread()

    def _is_readable(self) -> bool:
        return bool(self._unread) and not self._is_held

    def _is_one_received(self) -> bool:
        """Give the unread event to the receiver if it is one, of tokens."""
        if len(self._unread) != 1:
            return False
        (event,) = self._unread
        return isinstance(event, pb.SampleTokens) and self._is_received(event)

    def _is_received(self, tokens: pb.SampleTokens) -> bool:
        """Give tokens to the receiver if the reader waits for them; return whether it took them."""
        if self.receiver is None or self._reader is None or self._reader.done():
            return False
        try:
            return self.receiver(tokens)
        except Exception as error:  # of one request, not of the link
            self._error = error
            self._wake()
            return True

    def _start_wait(self, deadline: float | None) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        if self._timer is None and deadline is not None:
            self._timer = loop.call_at(deadline, self._expire)
        self._reader = loop.create_future()
        return self._reader

    def _expire(self) -> None:
        self._expired = True
        self._release()
        self._wake()

    def _wake(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None and not reader.done():  # done: its task was cancelled
            reader.set_result(None)

    def _put_paced(self, event: pb.SampleTokens) -> None:
        """Put tokens behind others, or hold them."""
        may_hold = self._is_held or not self._unread
        self._put_tokens(event)
        if may_hold and self._holds(event):
            self._is_held = True
        else:
            self.hand_out()

    def _holds(self, event: pb.SampleTokens) -> bool:
        if self.overflowed or self._expired or not self.pacing.active or event.HasField("end"):
            return False
        return self.pacing.hold(self, len(self._merging[event.sample].token_ids), self._handed_out_at)

    def _release(self) -> None:
        if self._is_held:
            self._is_held = False
            self.pacing.forget(self)

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
        self._release()
        unread, self._unread, self._tokens = self._unread, [], 0
        self._merging.clear()
        return unread
