"""What can be heard of the KV manager at work, by whoever measures it."""

from kvmanager import Applied, Session


class PoolObserver:
    """Hears of sessions and of their Steps, on the event loop. This one does nothing with it."""

    def attached(self, session: Session) -> None:
        """A session began; it may replace another one of the same engine."""

    def stepped(self, session: Session, applied: Applied, seconds: float) -> None:
        """A Step was read, applied and answered in so many seconds."""

    def lost(self, session: Session) -> None:
        """The stream of a session broke; its lease begins."""

    def expired(self, session: Session) -> None:
        """The lease of a session is over, and nobody has come back. It is detached next."""

    def detached(self, session: Session) -> None:
        """A session ended."""
