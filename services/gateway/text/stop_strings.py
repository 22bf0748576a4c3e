"""Matches stop strings in text while it is generated."""

import re
from collections.abc import Sequence
from typing import NamedTuple


class ReleasedText(NamedTuple):
    """Text that can be sent to the client, and the stop string that ended it (None while the text continues)."""

    text: str
    stop: str | None


class StopStringMatcher:
    """Searches one text for stop strings. The result does not depend on how the text is split into pieces.

    The text ends at the first character that completes a stop string. If the same character completes several, the
    longest one counts because it starts first. The released text ends before the stop string, or after it with
    `include`. A possible prefix of a stop string is held back.

    Raises ValueError for an empty stop string.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        if not all(stops):
            raise ValueError("A stop string must have at least one character.")
        self._matchers = [_PrefixMatcher(stop) for stop in dict.fromkeys(stops)]
        self._first_character = re.compile("|".join(sorted({re.escape(stop[0]) for stop in stops})) or r"(?!)")
        self._include = include
        self._held = ""  # the longest prefix of a stop string at the end of the text
        self._stop: str | None = None

    def push(self, text: str, *, may_end: bool = True) -> ReleasedText:
        """Add text and return what can be released. After a stop string this is always empty.

        With `may_end` False, complete stop strings are plain text.
        """
        if self._stop is not None:
            return ReleasedText("", self._stop)
        if not self._held and not self._first_character.search(text):
            return ReleasedText(text, None)
        at, text = len(self._held), self._held + text
        while (at := self._next_position(text, at)) < len(text):
            completed = self._advance(text[at])
            at += 1
            if completed is not None and may_end:
                self._stop = completed
                return self._end(text[:at], completed)
        return ReleasedText(self._hold(text), None)

    def finish(self) -> str:
        """Return the text held back after the last push."""
        rest, self._held = self._held, ""
        return rest

    def _next_position(self, text: str, at: int) -> int:
        """Return `at` during a partial match, else the next position at which a stop string could start."""
        if any(matcher.matched for matcher in self._matchers):
            return at
        first = self._first_character.search(text, at)
        return first.start() if first else len(text)

    def _advance(self, character: str) -> str | None:
        completed = [matcher.stop for matcher in self._matchers if matcher.advance(character)]
        return max(completed, key=len, default=None)

    def _end(self, text: str, stop: str) -> ReleasedText:
        self._held = ""
        return ReleasedText(text if self._include else text[: -len(stop)], stop)

    def _hold(self, text: str) -> str:
        end = len(text) - max((matcher.matched for matcher in self._matchers), default=0)
        self._held = text[end:]
        return text[:end]


class _PrefixMatcher:
    """Tracks the longest prefix of one stop string at the end of the text (Knuth, Morris and Pratt)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0  # characters
        self._borders = [0]  # for each prefix seen so far: the length of its longest proper prefix that is a suffix

    def advance(self, character: str) -> bool:
        """Add the next character of the text; return True if it completes the stop string."""
        self.matched = self._extended(self.matched, character)
        if self.matched > len(self._borders):
            # Computed on demand, because most requests match only the first characters of a long stop string.
            self._borders.append(self._extended(self._borders[-1], character))
        return self.matched == len(self.stop)

    def _extended(self, matched: int, character: str) -> int:
        while matched and self.stop[matched : matched + 1] != character:
            matched = self._borders[matched - 1]
        return matched + (self.stop[matched] == character)
