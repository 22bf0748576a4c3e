"""Stop strings of smg's requests. smg cuts its texts at them, too, but the engine would compute on."""

from collections.abc import Sequence
from typing import NamedTuple

import tokenizers

_INCOMPLETE = "\ufffd"
# Tokens decoded together with the next one: up to three hold the bytes of an incomplete character, and decoders treat
# the first token of a text differently.
_CONTEXT_TOKENS = 4


class FoundStop(NamedTuple):
    """A stop string, and the number of tokens up to the one that completes it, counted in the tokens of one call."""

    text: str
    tokens: int


class StopStrings:
    """Searches the text of one sample. The first character that completes a stop string ends it."""

    def __init__(
        self, backend: tokenizers.Tokenizer, stops: Sequence[str], min_tokens: int, *, skip_special_tokens: bool
    ) -> None:
        """A stop string that is complete before there are more than `min_tokens` tokens does not count."""
        self._backend = backend
        self._stops = sorted(stops, key=len, reverse=True)  # of those that end together, the longest
        self._kept = len(self._stops[0]) - 1
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []  # the last tokens
        self._taken = 0  # characters of their text that were searched
        self._text = ""  # the end of the text, in which a stop string may have begun
        self._uncounted = min_tokens

    def push(self, token_ids: Sequence[int]) -> FoundStop | None:
        """Add tokens, and return the stop string that they complete, if any."""
        for at, token in enumerate(token_ids):
            text = self._new_text(token)
            stop = self._found(text) if self._uncounted <= 0 else None
            self._uncounted -= 1
            if stop is not None:
                return FoundStop(stop, at + 1)
            self._text = (self._text + text)[-self._kept :] if self._kept else ""
        return None

    def _new_text(self, token: int) -> str:
        """Return the complete characters that a token adds."""
        self._window.append(token)
        text = self._complete_text()
        new, self._taken = text[self._taken :], max(self._taken, len(text))
        if len(self._window) >= 2 * _CONTEXT_TOKENS:
            self._window = self._window[-_CONTEXT_TOKENS:]
            self._taken = len(self._complete_text())
        return new

    def _complete_text(self) -> str:
        text = self._backend.decode(self._window, skip_special_tokens=self._skip_special_tokens)
        return text.rstrip(_INCOMPLETE)

    def _found(self, text: str) -> str | None:
        """Return the stop string that the next part of the text completes first."""
        begun, whole = len(self._text), self._text + text
        ends = ((end, stop) for stop in self._stops for end in _ends(whole, stop, begun))
        return min(ends, key=lambda one: one[0], default=(0, None))[1]


def _ends(text: str, stop: str, after: int) -> list[int]:
    """Return where the first occurrence of a stop string that ends behind `after` ends."""
    found = text.find(stop, max(0, after - len(stop) + 1))
    return [found + len(stop)] if found >= 0 else []
