"""Spans, which record a part of a request, or nothing.

What the services do with a span does not depend on whether it is recorded. One that is not says nothing, costs next to
nothing, and asks nobody else to record: its `trace_parent` is empty.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

Attributes = Mapping[str, str | bool | int | float]

NO_ATTRIBUTES: Attributes = {}


class Span(AbstractContextManager["Span", None]):
    """A part of a request's way, from its making until `end`. This one is not recorded.

    Times are in seconds of `time.monotonic`; None is now. As a context it ends with what is inside, and takes that for
    a fault if it raises.
    """

    trace_parent = ""  # names it to another process, as W3C's header `traceparent` does
    trace_id = ""

    def start_child(
        self, name: str, attributes: Attributes = NO_ATTRIBUTES, *, at: float | None = None, calls: bool = False
    ) -> "Span":
        """Begin a part of it; `calls` says that another process goes on with it."""
        del name, attributes, at, calls
        return self

    def add_event(self, name: str, attributes: Attributes = NO_ATTRIBUTES, *, at: float | None = None) -> None:
        """Note that something happened."""
        del name, attributes, at

    def set_attributes(self, attributes: Attributes) -> None:
        """Add attributes."""
        del attributes

    def end(self, fault: str = "", *, at: float | None = None) -> None:
        """End it. A fault marks it as failed. What comes after the end is ignored."""
        del fault, at

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.end(kind.__name__ if kind else "")


NO_SPAN = Span()


class Tracing:
    """Begins the spans of a process. This one records none."""

    def start_span(
        self, name: str, trace_parent: str, attributes: Attributes = NO_ATTRIBUTES, *, at: float | None = None
    ) -> Span:
        """Begin this process's part of a trace, or, with an empty or malformed parent, a trace of its own."""
        del name, trace_parent, attributes, at
        return NO_SPAN

    def close(self) -> None:
        """Send what is recorded, for a second or two at most. Waits."""
