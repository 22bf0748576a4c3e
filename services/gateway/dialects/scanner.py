"""A text that grows, for generators that read it and wait where it ends.

A reader yields when the text so far does not decide what comes next, and goes on when there is more. So what it reads
never depends on where the text was cut.
"""

import re
from collections.abc import Callable, Collection, Generator
from functools import lru_cache
from typing import NamedTuple, TypeVar

from services.gateway.dialects.events import Event

_T = TypeVar("_T")
Reading = Generator[None, None, _T]
"""A generator that yields where it waits for more text, and returns what it has read."""

Pass = Callable[[str], Event | None]
"""Returns the one event of a whole piece of text. None if the piece needs the reader, which must read it next."""

_STRING_END = re.compile(r'\\.|["\n]', re.DOTALL)
_LITERAL_END = re.compile(r"[\s,:\]}]")


class Markers:
    """Texts that structure an output. None of them begins with another one."""

    @staticmethod
    @lru_cache(256)
    def of(texts: tuple[str, ...]) -> "Markers":
        """Return the markers with these texts, which are those of declarations, so that there are few."""
        return Markers(texts)

    def __init__(self, texts: tuple[str, ...]) -> None:
        self.texts = tuple(dict.fromkeys(filter(None, texts)))
        self._any = re.compile("|".join(map(re.escape, self.texts)) or "(?!)")
        self._firsts = "".join(sorted({text[0] for text in self.texts}))
        self._first = re.compile(f"[{re.escape(self._firsts)}]" if self._firsts else "(?!)")
        self._longest = max(map(len, self.texts), default=0)

    def find(self, text: str, start: int) -> re.Match[str] | None:
        """Return the first marker from `start` on."""
        return self._any.search(text, start)

    def passing(self, event: Callable[[str], Event]) -> Pass:
        """Make events of pieces in which no marker begins, and which do not end with whitespace."""
        begins, firsts = self._first.search, self._firsts

        def passed(text: str) -> Event | None:
            return None if begins(text) or text[-1].isspace() else event(text)

        def passed_one(text: str) -> Event | None:
            return None if firsts in text or text[-1].isspace() else event(text)

        return passed_one if len(firsts) == 1 else passed

    def held_from(self, text: str, start: int) -> int:
        """Return where at the end of a text a marker may have begun; its length if none has."""
        for first in self._first.finditer(text, max(start, len(text) - self._longest + 1)):
            rest = text[first.start() :]
            if any(marker.startswith(rest) for marker in self.texts):
                return first.start()
        return len(text)


class Found(NamedTuple):
    """A marker, and the whitespace in front of it that was not emitted."""

    marker: str
    before: str


class Scanner:
    """The text, and the place `at` up to which it has been read."""

    def __init__(self) -> None:
        self.at = 0
        self.ended = False
        self.pinned = False  # a reader may go back
        self.passes: Pass | None = None  # set while a reader that has read all waits for more
        self._text = ""

    def push(self, text: str) -> None:
        """Add text."""
        self._text += text

    def forget(self) -> None:
        """Drop what has been read, unless a reader may go back to it."""
        if self.pinned:
            return
        self._text, self.at = self._text[self.at :], 0

    def offer(self, passes: Pass | None) -> None:
        """Let `passes` make the events of pieces until one needs the reader, if it has read all and goes not back."""
        self.passes = None if self._text or self.pinned else passes

    def since(self, start: int) -> str:
        """Return the text from `start` up to `at`."""
        return self._text[start : self.at]

    def peek(self) -> Reading[str]:
        """Return the next character, empty at the end of the text."""
        while self.at >= len(self._text) and not self.ended:
            yield
        return self._text[self.at : self.at + 1]

    def skip(self, characters: str = "") -> Reading[str]:
        """Read these characters, and whitespace if there are none. Return what follows, as `peek` does."""
        while following := (yield from self.peek()):
            if not (following in characters if characters else following.isspace()):
                break
            self.at += 1
        return following

    def one_of(self, texts: Collection[str]) -> Reading[str | None]:
        """Read the longest of these texts that follows; return None, and read nothing, if none does."""
        longest = max(map(len, texts), default=0)
        while True:
            rest = self._text[self.at : self.at + longest]
            undecided = any(len(text) > len(rest) and text.startswith(rest) for text in texts)
            if self.ended or not undecided:
                break
            yield
        found = max((text for text in texts if text and rest.startswith(text)), key=len, default=None)
        self.at += len(found or "")
        return found

    def expect(self, text: str) -> Reading[bool]:
        """Read a text; return False, and read nothing, if another one follows."""
        return not text or (yield from self.one_of((text,))) is not None

    def until(
        self,
        markers: Markers,
        emit: Callable[[str], None],
        *,
        keeps_blanks: bool = False,
        drops_cut: bool = False,
        passes: Pass | None = None,
    ) -> Reading[Found]:
        """Emit the text in front of the next marker, and read the marker, empty at the end of the text.

        Whitespace in front of it is not emitted, unless it is kept. `drops_cut` drops a marker that the end cuts.
        `passes` has the same effect as `emit` for pieces without either.
        """
        while True:
            found = markers.find(self._text, self.at)
            end = found.start() if found else markers.held_from(self._text, self.at)
            given = self._text[self.at : end]
            given = given if keeps_blanks or (self.ended and not found) else given.rstrip()
            if given:
                emit(given)
                self.at += len(given)
            if found:
                before, self.at = self._text[self.at : end], found.end()
                return Found(found[0], before)
            if self.ended:
                rest = self._text[self.at :]
                if rest and not drops_cut:
                    emit(rest)
                self.at = len(self._text)
                return Found("", "")
            self.forget()
            self.offer(passes)
            yield

    def string(self) -> Reading[str | None]:
        """Read a JSON string, quotes included; None if it does not end."""
        start, at = self.at, self.at + 1
        while True:
            if found := _STRING_END.search(self._text, at):
                at = found.end()
                if found[0] == "\n":
                    return None
                if found[0] == '"':
                    self.at = at
                    return self._text[start:at]
                continue
            if self.ended:
                return None
            at = max(at, len(self._text) - self._text.endswith("\\"))
            yield

    def literal(self) -> Reading[str]:
        """Read up to whitespace or what ends a JSON value."""
        start = self.at
        while not (found := _LITERAL_END.search(self._text, self.at)) and not self.ended:
            self.at = len(self._text)
            yield
        self.at = found.start() if found else len(self._text)
        return self._text[start : self.at]

    def drop_rest(self) -> None:
        """Read the rest of the text."""
        self.at = len(self._text)

    def available(self) -> str:
        """Return the text that has not been read yet."""
        return self._text[self.at :]
