"""From token ids to the text that a client gets: whole characters, up to a stop."""

from typing import NamedTuple

from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.stop_strings import StopRules, StopStrings
from services.gateway.text.tokenizer import Tokenizer


class TextPiece(NamedTuple):
    """What some tokens added: the text to send, how many of the tokens count, and the stop string that ended it."""

    text: str
    token_count: int
    stop: str | None


class TextStream:
    """The text of one sample. Before `min_tokens` no stop string ends it."""

    def __init__(self, tokenizer: Tokenizer, stopping: StopRules, special_tokens: bool) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=not special_tokens)
        self._stops = StopStrings(stopping.strings, stopping.include_stop)
        self._tokens_before_stop = stopping.min_tokens

    def push(self, token_ids: list[int]) -> TextPiece:
        """Add tokens one by one, as far as the token that completes a stop string."""
        text = ""
        for position, token in enumerate(token_ids, start=1):
            self._tokens_before_stop -= 1
            released = self._stops.push(self._detokenizer.push([token]), may_end=self._tokens_before_stop <= 0)
            text += released.text
            if released.stop is not None:
                return TextPiece(text, position, released.stop)
        return TextPiece(text, len(token_ids), None)

    def finish(self) -> TextPiece:
        """Give what was held back: no more tokens come."""
        released = self._stops.push(self._detokenizer.finish())
        if released.stop is not None:
            return TextPiece(released.text, 0, released.stop)
        return TextPiece(released.text + self._stops.finish(), 0, None)
