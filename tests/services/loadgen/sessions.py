"""Sessions, and a workload of them."""

from collections.abc import Iterator

from services.loadgen.workload.prompts import Kind, Piece
from services.loadgen.workload.workloads import Call, Session


class Sessions:
    """A workload with times that starts these sessions in order."""

    has_times = True

    def __init__(self, *sessions: Session) -> None:
        self._sessions = sessions

    def sessions(self) -> Iterator[Session]:
        return iter(self._sessions)

    def as_json(self) -> dict[str, object]:
        return {}


def session(calls: int, start: float = 0.0, gap: float = 0.0, tokens: int = 4) -> Session:
    """Build a session whose calls of `tokens` unique tokens follow each other after `gap` seconds."""
    made = (Call((Piece((Kind.UNIQUE, number), tokens),), 3, gap * number) for number in range(calls))
    return Session(tuple(made), start)
