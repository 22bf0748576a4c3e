"""The interface of the KV manager's observers, and the labels of a pool's metrics."""

from kvmanager import AppliedStep, Session

POOL_LABELS = ("model_name", "engine")


def pool_labels(session: Session) -> tuple[str, str]:
    """Return the label values of a session's pool."""
    return session.pool.spec.model, session.pool.spec.engine_id


class PoolObserver:
    """Receives events of sessions and their block steps, on the event loop; this default ignores them."""

    def on_attach(self, session: Session) -> None:
        """A session began; it may replace another session of the same engine."""

    def on_step(self, session: Session, applied: AppliedStep, seconds: float) -> None:
        """A block step was read and applied in `seconds`."""

    def on_disconnect(self, session: Session) -> None:
        """The stream of a session was lost; its lease begins."""

    def on_lease_expired(self, session: Session) -> None:
        """The lease of a session expired. `on_detach` follows."""

    def on_detach(self, session: Session) -> None:
        """A session ended."""
