"""Incremental detokenization: decodes a stream of token ids to complete characters."""

from codecs import getincrementaldecoder
from collections.abc import Sequence

from services.gateway.text.tokenizer import REPLACEMENT, Tokenizer

# Tokens decoded together with the next one: up to three hold the bytes of an incomplete character. One more precedes
# them because decoders treat the first token of a text differently.
_CONTEXT_TOKENS = 4

_UTF8 = getincrementaldecoder("utf-8")


class Detokenizer:
    """Decodes one stream of tokens.

    The results of all calls of `push` and of `finish`, joined, equal the text of all ids decoded at once. Returned text
    never changes: text is held back only while another token could change it. That is an incomplete character or, for
    a tokenizer with byte fallback, a run of byte tokens, because one invalid byte changes the text of the whole run.
    The cost of a token does not depend on the length of the stream.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._texts = tokenizer.texts(skip_special_tokens)
        self._window: list[int] = []  # the last tokens; empty if neither their text nor the next one's depends on them
        self._sent = 0  # characters of the window's text that have been returned
        self._run = _ByteFallbackRun()

    def push(self, ids: Sequence[int]) -> str:
        """Add token ids; return the text that is final now, which may be empty."""
        if len(ids) == 1:
            return self._push(ids[0])
        return "".join([self._push(token_id) for token_id in ids])

    def finish(self) -> str:
        """Return the text held back. Bytes of an incomplete character become U+FFFD."""
        text = self._window_text()
        rest, self._sent = text[self._sent :], len(text)
        return rest

    @property
    def held(self) -> str:
        """The complete characters held back, because another token could still change them."""
        return self._window_text()[self._sent :].rstrip(REPLACEMENT) if self._window else ""

    def _push(self, token_id: int) -> str:
        text = self._texts[token_id]
        if text is None or (text and self._window):
            return self._push_in_context(token_id)
        return text

    def _push_in_context(self, token_id: int) -> str:
        byte = self._tokenizer.byte_of(token_id)
        if byte is not None:
            return self._push_byte(token_id, byte)
        self._run = _ByteFallbackRun()
        self._window.append(token_id)
        return self._final_text()

    def _push_byte(self, token_id: int, byte: int) -> str:
        replacements = self._run.push(byte)
        if not replacements:
            self._window.append(token_id)
            return ""
        # The text of the run is final. Its last byte remains in the window as context for the next token.
        self._window = [token_id]
        self._sent = len(self._window_text())
        return REPLACEMENT * replacements

    def _final_text(self) -> str:
        text = self._window_text()
        end = len(text) - self._incomplete_characters(text)
        new_text, self._sent = text[self._sent : end], end
        if self._tokenizer.is_concatenative and end == len(text):
            self._window, self._sent = [], 0
        else:
            self._shorten_window(held=len(text) - end)
        return new_text

    def _incomplete_characters(self, text: str) -> int:
        # All bytes of an incomplete character decode to one U+FFFD.
        return int(not self._tokenizer.has_byte_fallback and text.endswith(REPLACEMENT))

    def _shorten_window(self, held: int) -> None:
        if len(self._window) >= 2 * _CONTEXT_TOKENS:
            self._window = self._window[-_CONTEXT_TOKENS:]
            self._sent = len(self._window_text()) - held

    def _window_text(self) -> str:
        return self._tokenizer.decode(self._window, self._skip_special_tokens)


class _ByteFallbackRun:
    """Consecutive byte tokens. They decode to text if they are valid UTF-8, else to one U+FFFD for each token."""

    def __init__(self) -> None:
        self._utf8 = _UTF8()
        self._length = 0
        self._is_invalid = False

    def push(self, byte: int) -> int:
        """Add a byte; return the number of U+FFFD that it makes final, 0 while the run can become text."""
        self._length += 1
        if self._is_invalid:
            return 1
        self._is_invalid = not self._accepts(byte)
        return self._length if self._is_invalid else 0

    def _accepts(self, byte: int) -> bool:
        try:
            self._utf8.decode(bytes([byte]))
        except UnicodeDecodeError:
            return False
        return True
