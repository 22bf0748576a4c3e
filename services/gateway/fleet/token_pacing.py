"""When tokens are held, so that a message has several of them."""

import asyncio
from collections.abc import Callable
from typing import Protocol

MAX_HOLD_SECONDS = 0.05

# Share of the time in which the event loop waited for something to do. Merging leaves it more time, so that the share
# at which merging begins is smaller than that at which it ends.
_BEHIND_BELOW = 0.1
_IN_TIME_ABOVE = 0.6
_WINDOW_SECONDS = 0.05


class HeldTokens(Protocol):
    """The tokens that one stream holds."""

    def hand_out(self) -> None:
        """Give them to their reader."""


class TokenPacing:
    """Decides for all streams of a gateway which tokens are held, and hands them out in time.

    Tokens are held until the message before is 50 ms old. That is the case while the event loop is behind, which means
    that it has hardly waited in the last 50 ms, and otherwise for messages of less than `interval` tokens.
    """

    def __init__(self, interval: int = 1, waited_seconds: Callable[[], float] | None = None) -> None:
        """`waited_seconds` returns how long the event loop has waited in total; without it, it is never behind."""
        self.active = interval > 1
        self._interval = interval
        self._waited_seconds = waited_seconds
        self._behind = False
        self._window: tuple[float, float] | None = None  # its start, and how long the loop had waited before
        self._held: dict[HeldTokens, float] = {}  # and when they are due
        self._timer: asyncio.TimerHandle | None = None

    def on_step(self) -> None:
        """Measure whether the loop is behind; called for each message of an engine."""
        if self._waited_seconds is None:
            return
        now, waited = self.now(), self._waited_seconds()
        start, waited_before = self._window = self._window or (now, waited)
        if now - start >= _WINDOW_SECONDS:
            share = (waited - waited_before) / (now - start)
            self._behind = share < (_IN_TIME_ABOVE if self._behind else _BEHIND_BELOW)
            self.active = self._behind or self._interval > 1
            self._window = now, waited

    def now(self) -> float:
        """Return the time of the event loop, in seconds."""
        return asyncio.get_running_loop().time()

    def hold(self, tokens: HeldTokens, count: int, handed_out_at: float) -> bool:
        """Return whether a message of `count` tokens is held; `handed_out_at` is when the one before was handed out.

        It is handed out when it is due, unless it is forgotten before.
        """
        due = handed_out_at + MAX_HOLD_SECONDS
        if self.now() >= due or not (self._behind or count < self._interval):
            return False
        self._held[tokens] = due
        self._arm(due)
        return True

    def forget(self, tokens: HeldTokens) -> None:
        """Hand out nothing later: the tokens are taken."""
        self._held.pop(tokens, None)

    def _arm(self, due: float) -> None:
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(due, self._hand_out_due)

    def _hand_out_due(self) -> None:
        now, self._timer = self.now(), None
        for tokens in [one for one, due in self._held.items() if due <= now]:
            self.forget(tokens)
            tokens.hand_out()
        if self._held:
            self._arm(min(self._held.values()))
