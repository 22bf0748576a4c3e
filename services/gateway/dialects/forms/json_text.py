"""Readers of JSON in an output."""

import json
import re

from services.gateway.dialects.events import Event
from services.gateway.dialects.forms.call_form import CallTarget
from services.gateway.dialects.scanner import Markers, Reading, Scanner

_STRUCTURE = re.compile(r'\\.|["{}\[\]\\\n]', re.DOTALL)


class ObjectEnd:
    """Finds the end of a JSON object or list that is given in pieces. It is `broken` by a line end in a string."""

    def __init__(self) -> None:
        self.broken = False
        self._depth = 0
        self._in_string = False
        self._escapes = False  # the last piece ended within an escape

    def find(self, piece: str) -> int | None:
        """Return the length of the last part if it ends, or breaks, in this piece."""
        if not self._escapes and not _STRUCTURE.search(piece):
            return None  # as most pieces, at once
        start, self._escapes = int(self._escapes and bool(piece)), self._escapes and not piece
        for found in _STRUCTURE.finditer(piece, start):
            mark = found[0]
            if mark[0] == "\\":
                self._escapes = len(mark) == 1
            elif mark == '"':
                self._in_string = not self._in_string
            elif self._in_string:
                if mark == "\n":
                    self.broken = True
                    return found.start()
            elif mark != "\n":
                self._depth += 1 if mark in "{[" else -1
                if not self._depth:
                    return found.end()
        return None


class _StreamedObject:
    """Finds the end of the arguments that a target gets."""

    def __init__(self, target: CallTarget) -> None:
        self.end = ObjectEnd()
        self.length: int | None = None  # of the last part, once it is known
        self._target = target

    def passes(self, piece: str) -> Event | None:
        """See Pass. A piece in which the object ends needs the reader, which must not look at it again."""
        self.length = self.end.find(piece)
        return self._target.further(piece) if self.length is None else None

    def take(self) -> bool:
        """Take what is there; return whether the object ends in it, and if so leave that to the caller."""
        scan = self._target.scan
        piece = scan.available()
        if self.length is None:
            self.length = self.end.find(piece)
        if self.length is not None:
            return True
        if piece:
            self._target.arguments(piece)
            scan.at += len(piece)
        scan.forget()
        return False


def stream_object(target: CallTarget, closing: str) -> Reading[bool]:
    """Emit the text of a JSON object or list while it is written. Return whether it is whole.

    A broken one ends in front of `closing`.
    """
    scan, streamed = target.scan, _StreamedObject(target)
    while not streamed.take():
        if scan.ended:
            return False
        scan.offer(streamed.passes)
        yield
    target.arguments(scan.available()[: streamed.length])
    scan.at += streamed.length or 0
    if streamed.end.broken:
        found = yield from scan.until(Markers.of((closing,)), target.arguments)
        scan.at -= len(found.marker)
    return not streamed.end.broken


def read_value(scan: Scanner) -> Reading[str | None]:
    """Read any JSON value; return its text, None if it has no end or is broken."""
    first = yield from scan.peek()
    if first == '"':
        return (yield from scan.string())
    if first not in ("{", "["):
        return (yield from scan.literal()) or None
    parts: list[str] = []
    end = ObjectEnd()
    while (length := end.find(piece := scan.available())) is None:
        parts.append(piece)
        scan.at += len(piece)
        if scan.ended:
            return None
        yield
    scan.at += length
    return None if end.broken else "".join([*parts, piece[:length]])


def loaded(text: str) -> object:
    """Return the value of a JSON text, None for text that is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
