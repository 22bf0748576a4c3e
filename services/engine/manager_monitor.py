"""Watches whether an engine has its KV manager, and for how long it has not."""

from collections.abc import Callable


class ManagerMonitor:
    """Only the engine's thread calls it, but for `watch` and for reading `gone`."""

    def __init__(self, patience: float, now: float) -> None:
        """Begin without a manager. Requests wait so many seconds for one, then each fails."""
        self.patience = patience
        self.gone = False  # for longer than that
        self._since: float | None = now
        self._watchers: list[Callable[[], None]] = []

    def watch(self, changed: Callable[[], None]) -> None:
        """Have this called, on the engine's thread, whenever `gone` has changed."""
        self._watchers.append(changed)

    @property
    def counts_down(self) -> bool:
        """Whether there is no manager, and requests wait for it still."""
        return self._since is not None and not self.gone

    def look(self, ready: bool, now: float) -> bool:
        """Note whether there is a manager now; return `gone`."""
        self._since = None if ready else now if self._since is None else self._since
        gone = self._since is not None and now - self._since > self.patience
        if gone != self.gone:
            self.gone = gone
            for changed in self._watchers:
                changed()
        return gone
