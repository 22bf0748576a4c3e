"""Where each token begins in the text of a choice of /v1/completions.

Tokens without text of their own, such as the start of the sequence, and the later ones of a character of several tokens
begin where the next text begins. No offset is beyond the text.
"""

from collections.abc import Sequence
from typing import NamedTuple

from quire.v1 import decoding_pb2
from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.tokenizer import Tokenizer


class TextOffsets:
    """Offsets in characters of the tokens of one text, which begins at `start`."""

    def __init__(self, tokenizer: Tokenizer, *, special_tokens: bool, start: int = 0) -> None:
        """`special_tokens`: whether the text has the names of special tokens."""
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=not special_tokens)
        # Of byte-level vocabularies: tokens of complete characters, which do not depend on the tokens around them.
        self._texts = tokenizer.texts(not special_tokens) if tokenizer.is_concatenative else None
        self._end = self._last = start

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """Return the offsets of the next tokens."""
        return [self._next(token) for token in token_ids]

    def _next(self, token: int) -> int:
        offset = self._end + len(self._detokenizer.held)
        self._end += len(self._detokenizer.push([token]))
        if self._texts is not None and (own := self._texts[token]):
            offset = self._end - len(own)  # what was incomplete before it is U+FFFD now
        # In a run of byte tokens, an incomplete character hides the complete ones before it.
        self._last = max(self._last, offset)
        return self._last


class PlacedToken(NamedTuple):
    """A token, its log-probabilities, and its offset."""

    token_id: int
    scores: decoding_pb2.TokenLogprobs
    offset: int


class StreamedTokens:
    """The tokens of a streamed text. Each is returned with the text that it begins in, so that its offset is final.

    A token whose text is held back, as the start of a character or of a stop string may be, waits for it.
    """

    def __init__(self, offsets: TextOffsets, start: int = 0) -> None:
        """The text begins at `start`, as do the offsets."""
        self._offsets = offsets
        self._end = start
        self._waiting: list[PlacedToken] = []

    def add(
        self, text: str, token_ids: Sequence[int], logprobs: Sequence[decoding_pb2.TokenLogprobs]
    ) -> list[PlacedToken]:
        """Add text and tokens; return the tokens that begin in the text so far."""
        self._end += len(text)
        self._waiting += map(PlacedToken, token_ids, logprobs, self._offsets.of(token_ids))
        begun = sum(token.offset < self._end for token in self._waiting)
        found, self._waiting = self._waiting[:begun], self._waiting[begun:]
        return found

    def finish(self) -> list[PlacedToken]:
        """Return the other tokens, which have no text: they are at its end."""
        found, self._waiting = self._waiting, []
        return [token._replace(offset=self._end) for token in found]


def prompt_offsets(tokenizer: Tokenizer, text: str, token_ids: Sequence[int], *, given_as_text: bool) -> list[int]:
    """Return the offsets of the tokens of a prompt.

    A text that the client gave has the names of special tokens, but not those that are added around it.
    """
    if not given_as_text:
        return _within(text, TextOffsets(tokenizer, special_tokens=False).of(token_ids))
    before, after = map(len, tokenizer.special_tokens_around)
    inner = TextOffsets(tokenizer, special_tokens=True).of(token_ids[before : len(token_ids) - after])
    return _within(text, [*[0] * before, *inner, *[len(text)] * after])


def output_offsets(tokenizer: Tokenizer, text: str, token_ids: Sequence[int], *, special_tokens: bool) -> list[int]:
    """Return the offsets of the tokens of a complete output; a stop string that it leaves out is at its end."""
    return _within(text, TextOffsets(tokenizer, special_tokens=special_tokens).of(token_ids))


def _within(text: str, offsets: Sequence[int]) -> list[int]:
    """A normalizer may have changed the text: it can be shorter than that of its tokens."""
    return [min(offset, len(text)) for offset in offsets]
