"""Turns of the chats of one model to be rendered."""

import asyncio
from collections import deque

from services.runtime.errors import Overloaded, RejectionReason

# A chat that has waited so long is refused, and so those before it have gone, too.
MAX_WAIT_SECONDS = 10.0
# Weight of the latest turn in the average.
_NEWEST = 1 / 8
_LEAST_RETRY_SECONDS = 1.0


class Turns:
    """Gives `at_once` turns at a time, to tenants in rotation, and to each one's chats in the order of their arrival.

    At most `most_waiting` wait. Then the tenant that has most of them loses its last. `refuses_early`: a chat whose
    turn would come too late, by the average of earlier turns, does not wait for it.
    """

    def __init__(self, at_once: int, most_waiting: int, *, refuses_early: bool = False) -> None:
        self._at_once = at_once
        self._most_waiting = most_waiting
        self._refuses_early = refuses_early
        self._taken = 0
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by tenant, that of the next turn first
        self._average_seconds = 0.0

    async def take(self, tenant: str, until: float) -> None:
        """Wait for a turn, until a time of the event loop at most. Raises Overloaded."""
        if self._taken < self._at_once:
            self._taken += 1
            return
        loop = asyncio.get_running_loop()
        if self._refuses_early and loop.time() + self._seconds_until_turn(tenant) > until:
            raise self._overloaded(tenant)
        if self._count() >= self._most_waiting:
            self._refuse_one(tenant)
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            async with asyncio.timeout_at(until):
                await turn
        except TimeoutError:
            self._withdraw(tenant, turn)
            raise self._overloaded(tenant) from None
        except BaseException:
            self._withdraw(tenant, turn)
            raise

    def give_back(self, seconds: float) -> None:
        """End a turn that was used for so long; the next chat gets it."""
        self._average_seconds += (seconds - self._average_seconds) * (_NEWEST if self._average_seconds else 1)
        self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            tenant = next(iter(self._waiting))
            turns = self._waiting.pop(tenant)
            turn = turns.popleft()
            if turns:
                self._waiting[tenant] = turns
            if not turn.done():
                turn.set_result(None)
                return
        self._taken -= 1

    def _withdraw(self, tenant: str, turn: "asyncio.Future[None]") -> None:
        """Remove a chat that no longer waits, or pass on the turn that it got meanwhile."""
        if turn in (turns := self._waiting.get(tenant, deque())):
            self._remove(tenant, turns.index(turn))
        elif turn.done() and not turn.cancelled() and turn.exception() is None:
            self._pass_on()

    def _remove(self, tenant: str, at: int) -> "asyncio.Future[None]":
        turns = self._waiting[tenant]
        turn = turns[at]
        del turns[at]
        if not turns:
            del self._waiting[tenant]
        return turn

    def _count(self) -> int:
        return sum(map(len, self._waiting.values()))

    def _refuse_one(self, tenant: str) -> None:
        """Refuse the last chat of the tenant with most. Raises Overloaded if that is the new one."""
        most = max(self._waiting, key=lambda one: len(self._waiting[one]))
        if len(self._waiting[most]) <= len(self._waiting.get(tenant, ())) + 1:
            raise self._overloaded(tenant)
        refused = self._remove(most, -1)
        if not refused.done():
            refused.set_exception(self._overloaded(most))

    def _seconds_until_turn(self, tenant: str) -> float:
        own = len(self._waiting.get(tenant, ()))
        others = sum(min(len(turns), own + 1) for name, turns in self._waiting.items() if name != tenant)
        return (own + others + 1) * self._average_seconds / self._at_once

    def _overloaded(self, tenant: str) -> Overloaded:
        seconds = min(MAX_WAIT_SECONDS, max(_LEAST_RETRY_SECONDS, self._seconds_until_turn(tenant)))
        waiting = self._count()
        chats = "1 chat of the model waits for its" if waiting == 1 else f"{waiting} chats of the model wait for their"
        message = f"{chats} template; retry in about {seconds:.0f} s"
        return Overloaded(message, retry_seconds=seconds, rejection=RejectionReason.CHAT_TEMPLATE)
