"""A workload of given sessions."""

from collections.abc import Iterator

from services.loadgen.workload.workloads import Session


class Sessions:
    """A workload with times that starts these sessions in order."""

    has_times = True

    def __init__(self, *sessions: Session) -> None:
        self._sessions = sessions

    def sessions(self) -> Iterator[Session]:
        return iter(self._sessions)

    def as_json(self) -> dict[str, object]:
        return {}
