"""The leases of pools whose engines are disconnected: how long each pool is kept for its engine to attach again."""

import asyncio
from collections.abc import Callable

from kvmanager import Session

# Between two looks whether the handshake, for which the pool of an expired lease is kept, has ended.
_HANDSHAKE_SECONDS = 1.0


class Leases:
    """One timer for each disconnected session. An expired lease waits for a handshake, which has limits of its own."""

    def __init__(
        self, seconds: float, is_attaching: Callable[[Session], bool], expired: Callable[[Session], None]
    ) -> None:
        """Call `expired` on the event loop `seconds` after a lease has started, once no handshake needs its pool."""
        self.seconds = seconds
        self._is_attaching = is_attaching
        self._expired = expired
        self._timers: dict[Session, asyncio.TimerHandle] = {}

    def start(self, session: Session) -> None:
        """Start the lease of a session whose engine has disconnected."""
        self._start(session, self.seconds)

    def cancel(self, session: Session) -> None:
        """End the lease of a session whose pool is dropped, if it has one."""
        if (timer := self._timers.pop(session, None)) is not None:
            timer.cancel()

    def _start(self, session: Session, seconds: float) -> None:
        self._timers[session] = asyncio.get_running_loop().call_later(seconds, self._expire, session)

    def _expire(self, session: Session) -> None:
        if self._is_attaching(session):
            self._start(session, _HANDSHAKE_SECONDS)
        else:
            self._expired(session)
