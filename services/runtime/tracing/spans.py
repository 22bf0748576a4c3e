"""Spans of requests, recorded or not.

Services use both kinds alike. A span that is not recorded costs almost nothing, and its empty `trace_parent` stops
other processes from recording.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

Attributes = Mapping[str, str | bool | int | float]

NO_ATTRIBUTES: Attributes = {}


class Span(AbstractContextManager["Span", None]):
    """A part of a request, from its creation until `end`. This base class records nothing.

    Times are in seconds of `time.monotonic`; None is now. As a context manager it ends with the context, and an
    exception marks it as failed.
    """

    trace_parent = ""  # for another process, in the format of W3C's header `traceparent`
    trace_id = ""

    def start_child(
        self, name: str, attributes: Attributes = NO_ATTRIBUTES, *, at: float | None = None, calls: bool = False
    ) -> "Span":
        """Start a child span; with `calls`, another process continues it."""
        del name, attributes, at, calls
        return self

    def add_event(self, name: str, attributes: Attributes = NO_ATTRIBUTES, *, at: float | None = None) -> None:
        """Add an event."""
        del name, attributes, at

    def set_attributes(self, attributes: Attributes) -> None:
        """Add attributes."""
        del attributes

    def end(self, fault: str = "", *, at: float | None = None) -> None:
        """End the span; a fault marks it as failed. Later calls are ignored."""
        del fault, at

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.end(kind.__name__ if kind else "")


NO_SPAN = Span()


class Tracing:
    """Starts the spans of a process. This base class records none."""

    def start_span(
        self, name: str, trace_parent: str, attributes: Attributes = NO_ATTRIBUTES, *, at: float | None = None
    ) -> Span:
        """Start this process's part of a trace; an empty or malformed parent starts a new trace."""
        del name, trace_parent, attributes, at
        return NO_SPAN

    def close(self) -> None:
        """Send the recorded spans. Waits for at most two seconds."""
