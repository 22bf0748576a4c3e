"""Ends a text where one of several strings appears, while the text is still coming."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class StopRules:
    """When a sample ends. `max_tokens` None means as many as fit."""

    max_tokens: int | None
    min_tokens: int
    strings: tuple[str, ...]
    token_ids: tuple[int, ...]
    include_stop: bool
    ignore_eos: bool


class Released(NamedTuple):
    """What a piece of text let go.

    `text` may be told to the client. `stop` is the stop string that ended the text; None while it goes on.
    """

    text: str
    stop: str | None


class StopStrings:
    """Watches one text for stop strings. How the text is cut into pieces makes no difference.

    The text ends with the first character that completes a stop string; of several completed by the same character
    the longest counts, since it began first. What is told is the text before the stop string, and the stop string
    itself if `include` is set. Text that could be the beginning of a stop string is held back until it cannot.

    Raises ValueError for an empty stop string.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        if not all(stops):
            raise ValueError("A stop string needs at least one character.")
        self._progress = [_Progress(stop) for stop in dict.fromkeys(stops)]
        self._first_character = re.compile("|".join(sorted({re.escape(stop[0]) for stop in stops})) or r"(?!)")
        self._include = include
        self._held = ""  # as long as the longest beginning of a stop string that the text ends with
        self._stop: str | None = None

    def push(self, text: str, *, may_end: bool = True) -> Released:
        """Take the next piece of text. Once a stop string was found, nothing more is released.

        A stop string that is complete where the text may not end yet is text like any other.
        """
        if self._stop is not None:
            return Released("", self._stop)
        at, text = len(self._held), self._held + text
        while (at := self._next_of_interest(text, at)) < len(text):
            completed = self._advance(text[at])
            at += 1
            if completed is not None and may_end:
                self._stop = completed
                return self._end(text[:at], completed)
        return Released(self._hold(text), None)

    def finish(self) -> str:
        """Return the text still held back: nothing follows that could make it a stop string."""
        rest, self._held = self._held, ""
        return rest

    def _next_of_interest(self, text: str, at: int) -> int:
        """Where scanning goes on: here when a stop string has begun, else where the next one could begin."""
        if any(progress.matched for progress in self._progress):
            return at
        first = self._first_character.search(text, at)
        return first.start() if first else len(text)

    def _advance(self, character: str) -> str | None:
        completed = [progress.stop for progress in self._progress if progress.advance(character)]
        return max(completed, key=len, default=None)

    def _end(self, text: str, stop: str) -> Released:
        self._held = ""
        return Released(text if self._include else text[: -len(stop)], stop)

    def _hold(self, text: str) -> str:
        safe = len(text) - max((progress.matched for progress in self._progress), default=0)
        self._held = text[safe:]
        return text[:safe]


class _Progress:
    """How much of the beginning of one stop string the text ends with (Knuth, Morris and Pratt)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0  # characters
        self._borders = [0]  # for each beginning seen so far: the longest shorter beginning that it ends with

    def advance(self, character: str) -> bool:
        """Take the next character of the text; return whether it completes the stop string."""
        self.matched = self._extended(self.matched, character)
        if self.matched > len(self._borders):
            # Just in time: most requests never see more than the first characters of a long stop string.
            self._borders.append(self._extended(self._borders[-1], character))
        return self.matched == len(self.stop)

    def _extended(self, matched: int, character: str) -> int:
        while matched and self.stop[matched : matched + 1] != character:
            matched = self._borders[matched - 1]
        return matched + (self.stop[matched] == character)
