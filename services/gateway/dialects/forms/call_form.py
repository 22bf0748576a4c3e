"""What the forms of calls share."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from services.gateway.dialects.events import Arguments, CallEnd, CallStart, Event, Text
from services.gateway.dialects.offered_tools import OfferedTools
from services.gateway.dialects.scanner import Reading, Scanner
from services.wire.requests.argument_texts import ArgumentTexts

NO_ARGUMENTS = ("null", '""')
"""What models write in place of arguments."""


class WrittenCall(NamedTuple):
    """A call to write. `arguments` is the text of a JSON object."""

    name: str
    arguments: str
    id: str = ""


class Around(NamedTuple):
    """What stands in front of the arguments of a call, its name included, and behind them.

    With `after_number`, a number and that text stand behind `begin`.
    """

    begin: str
    end: str
    after_number: str = ""


@dataclass
class CallTarget:
    """Where a form reads a call from, and where its events go to. `closing` ends the section of the call.

    `passed` is text of calls of other tools, which stands in front of the next call. `further` makes the event of a
    further part of the arguments, for pieces that pass the scanner.
    """

    scan: Scanner
    tools: OfferedTools
    emit: Callable[[Event], None]
    further: Callable[[str], Arguments]
    closing: str = ""
    passed: str = ""

    def start(self, name: str, call_id: str = "") -> None:
        """Begin a call. What has been read since the section began is not text any more."""
        if self.passed:
            self.emit(Text(self.passed))
        self.emit(CallStart(name, call_id))
        self.scan.pinned = False

    def arguments(self, text: str) -> None:
        """Add to the arguments."""
        self.emit(Arguments(text))

    def end(self) -> None:
        """End the call."""
        self.emit(CallEnd())

    def whole(self, name: str, arguments: Mapping[str, Any] | None) -> bool:
        """Add a call that has been read to its end. Return False if it has no arguments, and needs some."""
        if arguments is None or (not arguments and self.tools.requires_arguments(name)):
            return False
        self.start(name)
        self.arguments(json.dumps(arguments, ensure_ascii=False))
        self.end()
        return True


class CallForm(Protocol):
    """How one call is written."""

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts by which a call differs from those of other forms."""

    @property
    def argument_texts(self) -> ArgumentTexts | None:
        """The texts around arguments; None if they are an object in JSON."""

    def around(self, name: str) -> Around:
        """Return what a model writes around the arguments."""

    def read(self, target: CallTarget) -> Reading[bool]:
        """Read one call. Return False, without events, if what follows is none of an offered tool."""

    def passes(self, target: CallTarget) -> Reading[bool]:
        """Read a whole call of any tool, without events. Return False if there is none, or a section has one call."""

    def written(self, call: WrittenCall) -> str:
        """Return a call as a model writes it."""
