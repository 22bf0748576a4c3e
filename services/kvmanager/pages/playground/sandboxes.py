"""The sandboxes of all pages, bounded in number and idle time."""

import secrets
from collections import OrderedDict
from collections.abc import Callable

from services.kvmanager.pages.playground.sandbox import Sandbox

_MAX_SANDBOXES = 64
_IDLE_SECONDS = 1800.0
_NAME_BYTES = 16


class UnknownSandbox(Exception):
    """The sandbox does not exist: it was idle, replaced by newer ones, or the KV manager has restarted."""


class Sandboxes:
    """The sandboxes by name. At the maximum, the least recently used one is removed."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._boxes: OrderedDict[str, tuple[Sandbox, float]] = OrderedDict()  # least recently used first

    def create(self, block_size: int) -> str:
        """Create a sandbox; return its random name."""
        self._remove_idle()
        if len(self._boxes) >= _MAX_SANDBOXES:
            self._boxes.popitem(last=False)
        name = secrets.token_urlsafe(_NAME_BYTES)
        self._boxes[name] = (Sandbox(block_size), self._clock())
        return name

    def get(self, name: str) -> Sandbox:
        """Return a sandbox. Raises UnknownSandbox."""
        self._remove_idle()
        if name not in self._boxes:
            raise UnknownSandbox("this sandbox does not exist any more: create a new one")
        box, _ = self._boxes.pop(name)
        self._boxes[name] = (box, self._clock())
        return box

    def replace(self, name: str, box: Sandbox) -> None:
        """Replace a sandbox, if it still exists."""
        if name in self._boxes:
            self._boxes[name] = (box, self._clock())

    def _remove_idle(self) -> None:
        while self._boxes and next(iter(self._boxes.values()))[1] < self._clock() - _IDLE_SECONDS:
            self._boxes.popitem(last=False)
