"""What came back for one request and was not read yet."""

import asyncio
from dataclasses import dataclass, field

from quire.v1 import engine_pb2 as pb
from services.runtime.errors import SlowClient

Event = pb.RequestStarted | pb.PromptScores | pb.SampleTokens | pb.RequestFinished | pb.RequestRefused


class EngineDisconnected(Exception):
    """The link to the engine broke; whatever it had for a request is lost."""


@dataclass(eq=False)
class RequestStream:
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
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, event: Event) -> None:
        """Add an event. Never waits."""
        if self.overrun:
            return
        if isinstance(event, pb.SampleTokens):
            self._put_tokens(event)
        else:
            self._waiting.append(event)
        self._arrived.set()

    def lose(self) -> None:
        """The link broke: nothing more comes."""
        self.lost = True
        self._arrived.set()

    async def next_events(self, deadline: float | None) -> list[Event]:
        """Wait for events and return all that is there.

        Raises SlowClient if the buffer overflowed, EngineDisconnected if no event can follow, and TimeoutError when the
        event loop's clock reaches `deadline`.
        """
        if not self._arrived.is_set():
            async with asyncio.timeout_at(deadline):
                await self._arrived.wait()
        if self.overrun:
            raise SlowClient(f"more than {self.most_tokens} tokens waited for being read")
        if not self._waiting:
            raise EngineDisconnected
        if not self.lost:  # else what came before counts
            self._arrived.clear()
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
