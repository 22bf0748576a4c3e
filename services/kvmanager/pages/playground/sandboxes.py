"""The sandboxes of all pages: so many at most, and each for as long as it is used."""

import secrets
from collections import OrderedDict
from collections.abc import Callable

from services.kvmanager.pages.playground.sandbox import Sandbox

_MOST = 64
_IDLE_SECONDS = 1800.0
_NAME_BYTES = 16


class UnknownSandbox(Exception):
    """There is no such sandbox: it was not used for a while, or others came, or the KV manager was started again."""


class Sandboxes:
    """Pools that people drive by hand. Where there is no room, the one that was not used for longest goes."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._boxes: OrderedDict[str, tuple[Sandbox, float]] = OrderedDict()  # least recently used first

    def begin(self, block_size: int) -> str:
        """Make a sandbox; return its name, which nobody can guess."""
        self._forget_idle()
        if len(self._boxes) >= _MOST:
            self._boxes.popitem(last=False)
        name = secrets.token_urlsafe(_NAME_BYTES)
        self._boxes[name] = (Sandbox(block_size), self._clock())
        return name

    def get(self, name: str) -> Sandbox:
        """Return a sandbox. Raises UnknownSandbox."""
        self._forget_idle()
        if name not in self._boxes:
            raise UnknownSandbox("this sandbox is gone: begin a new one")
        box, _ = self._boxes.pop(name)
        self._boxes[name] = (box, self._clock())
        return box

    def replace(self, name: str, box: Sandbox) -> None:
        """Put another sandbox in the place of one, unless that is gone meanwhile."""
        if name in self._boxes:
            self._boxes[name] = (box, self._clock())

    def _forget_idle(self) -> None:
        while self._boxes and next(iter(self._boxes.values()))[1] < self._clock() - _IDLE_SECONDS:
            self._boxes.popitem(last=False)
