"""The processor time of a chat's renderings: a small share at first, the whole only for a chat that has used it up.

Nearly all chats need less than the first share. The few that need more, and those that would never end, are rendered
again from the start, in a process of their own, so that the others do not wait for them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from services.gateway.text.rendering.render_process import RenderProcess
from services.gateway.text.rendering.worker import RENDER_SECONDS, TIMED_OUT, Answer

FIRST_SECONDS = 0.03
_LEAST_SECONDS = 1e-3


class FirstShareUsed(Exception):
    """The renderings of a chat need more than the first share of processor time."""


class _Share:
    def __init__(self, *, whole: bool) -> None:
        self.whole = whole
        self.seconds_left = RENDER_SECONDS if whole else FIRST_SECONDS


_current: ContextVar[_Share | None] = ContextVar("share", default=None)


@contextmanager
def share_of_chat(*, whole: bool) -> Iterator[None]:
    """Limit the renderings of this block, in this thread, together. Without it each has the whole time.

    Renderings beyond the first share raise FirstShareUsed, those beyond the whole have a limit as their answer.
    """
    token = _current.set(_Share(whole=whole))
    try:
        yield
    finally:
        _current.reset(token)


class RenderProcesses:
    """The processes of one model: one for first shares, and one for chats that have the whole time."""

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._first = RenderProcess(sources)
        self._long = RenderProcess(sources)

    def render(self, template: str, variables: Mapping[str, Any]) -> Answer:
        """Return the text of a template, or the reason why there is none. Raises FirstShareUsed."""
        share = _current.get()
        if share is None:
            return self._first.render(template, variables)
        process = self._long if share.whole else self._first
        answer = TIMED_OUT
        if share.seconds_left >= _LEAST_SECONDS:
            answer = process.render(template, variables, share.seconds_left)
        share.seconds_left -= answer.seconds
        if answer.timed_out and not share.whole:
            raise FirstShareUsed
        return answer
