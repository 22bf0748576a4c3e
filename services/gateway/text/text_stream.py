"""Converts the token ids of a sample to the text sent to the client, up to a stop string."""

from typing import NamedTuple

from quire.v1 import decoding_pb2
from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.stop_strings import StopStringMatcher
from services.gateway.text.tokenizer import Tokenizer


class TextDelta(NamedTuple):
    """The text of some tokens, the number of tokens up to a stop string, and that stop string, if any."""

    text: str
    token_count: int
    stop: str | None


class TextStream:
    """The text of one sample. Stop strings within the first `min_tokens` do not end it."""

    def __init__(self, tokenizer: Tokenizer, stopping: decoding_pb2.Stopping, special_tokens: bool) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=not special_tokens)
        self._stops = StopStringMatcher(stopping.stop_strings, stopping.include_stop)
        self._has_stops = bool(stopping.stop_strings)
        self._tokens_before_stop = stopping.min_tokens

    def push_inner(self, token_ids: list[int]) -> str:
        """Add tokens without stop strings; return the new text."""
        return self._detokenizer.push(token_ids)

    def push(self, token_ids: list[int]) -> TextDelta:
        """Add tokens one at a time, up to the token that completes a stop string."""
        if not self._has_stops:
            return TextDelta(self._detokenizer.push(token_ids), len(token_ids), None)
        text = ""
        for position, token in enumerate(token_ids, start=1):
            self._tokens_before_stop -= 1
            released = self._stops.push(self._detokenizer.push([token]), may_end=self._tokens_before_stop <= 0)
            text += released.text
            if released.stop is not None:
                return TextDelta(text, position, released.stop)
        return TextDelta(text, len(token_ids), None)

    def finish(self) -> TextDelta:
        """Return the text held back after the last token."""
        released = self._stops.push(self._detokenizer.finish())
        if released.stop is not None:
            return TextDelta(released.text, 0, released.stop)
        return TextDelta(released.text + self._stops.finish(), 0, None)
