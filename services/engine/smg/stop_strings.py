"""Stop strings of smg's requests. smg cuts its texts at them, too, but the engine would compute on."""

from collections.abc import Sequence
from typing import NamedTuple

import tokenizers
from tokenizers.decoders import DecodeStream


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
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._text = ""  # the end of the text, in which a stop string may have begun
        self._uncounted = min_tokens

    def push(self, token_ids: Sequence[int]) -> FoundStop | None:
        """Add tokens, and return the stop string that they complete, if any."""
        for at, token in enumerate(token_ids):
            text = self._stream.step(self._backend, token) or ""
            stop = self._found(text) if self._uncounted <= 0 else None
            self._uncounted -= 1
            if stop is not None:
                return FoundStop(stop, at + 1)
            self._text = (self._text + text)[-self._kept :] if self._kept else ""
        return None

    def _found(self, text: str) -> str | None:
        """Return the stop string that the next part of the text completes first."""
        begun, whole = len(self._text), self._text + text
        ends = ((end, stop) for stop in self._stops for end in _ends(whole, stop, begun))
        return min(ends, key=lambda one: one[0], default=(0, None))[1]


def _ends(text: str, stop: str, after: int) -> list[int]:
    """Return where the first occurrence of a stop string that ends behind `after` ends."""
    found = text.find(stop, max(0, after - len(stop) + 1))
    return [found + len(stop)] if found >= 0 else []
