"""Monitors the connection between an engine and its KV manager."""

from collections.abc import Callable


class ManagerMonitor:
    """Only the engine's thread calls it, except for `on_change` and reads of `lost`."""

    def __init__(self, timeout_seconds: float, now: float) -> None:
        """Start without a manager. After `timeout_seconds` without one, `lost` becomes True."""
        self.timeout_seconds = timeout_seconds
        self.lost = False
        self._since: float | None = now
        self._callbacks: list[Callable[[], None]] = []

    def on_change(self, changed: Callable[[], None]) -> None:
        """Call `changed` on the engine's thread whenever `lost` has changed."""
        self._callbacks.append(changed)

    @property
    def waiting(self) -> bool:
        """Return True if there is no manager and requests still wait for it."""
        return self._since is not None and not self.lost

    def record(self, ready: bool, now: float) -> bool:
        """Record whether the manager is connected; return `lost`."""
        self._since = None if ready else now if self._since is None else self._since
        lost = self._since is not None and now - self._since > self.timeout_seconds
        if lost != self.lost:
            self.lost = lost
            for changed in self._callbacks:
                changed()
        return lost
