"""Observers of the KV manager at work, and the labels of their series."""

from kvmanager import AppliedStep, Session

POOL_LABELS = ("model_name", "engine")


def pool_labels(session: Session) -> tuple[str, str]:
    """Return the labels' values for a session's pool."""
    return session.pool.spec.model, session.pool.spec.engine_id


class PoolObserver:
    """Receives events of sessions and their Steps, on the event loop; this default ignores them."""

    def attached(self, session: Session) -> None:
        """A session began; it may replace another one of the same engine."""

    def stepped(self, session: Session, applied: AppliedStep, seconds: float) -> None:
        """A Step was read, applied and answered in so many seconds."""

    def lost(self, session: Session) -> None:
        """The stream of a session broke; its lease begins."""

    def expired(self, session: Session) -> None:
        """The lease of a session is over, and nobody has come back. It is detached next."""

    def detached(self, session: Session) -> None:
        """A session ended."""
