"""What the output of a sample consists of.

Calls do not nest: a CallStart is followed by its Arguments, then by a CallEnd. The arguments of a call that the end of
the output cuts are not whole.
Events that follow each other and have the same type are parts of one text.
"""

from typing import NamedTuple


class Reasoning(NamedTuple):
    """The next part of a thought."""

    text: str


class Text(NamedTuple):
    """The next part of the answer."""

    text: str


class CallStart(NamedTuple):
    """A call of a tool. `id` is the model's own id of it, empty for most models."""

    name: str
    id: str = ""


class Arguments(NamedTuple):
    """The next part of the arguments of the call, which are a JSON object as text."""

    text: str


class CallEnd(NamedTuple):
    """The end of the call."""


Event = Reasoning | Text | CallStart | Arguments | CallEnd


def merged(events: list[Event]) -> list[Event]:
    """Return the events with adjacent parts of one text as one event."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Reasoning | Text | Arguments) and type(event) is type(last):
            found[-1] = type(event)(last.text + event.text)
        else:
            found.append(event)
    return found
