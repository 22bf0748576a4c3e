"""The labels of a pool's series."""

from kvmanager import Session

POOL_LABELS = ("model_name", "engine")


def pool_labels(session: Session) -> tuple[str, str]:
    """Return their values for a session's pool."""
    return session.pool.spec.model, session.pool.spec.engine_id
