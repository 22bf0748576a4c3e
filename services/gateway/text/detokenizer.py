"""Token ids into text while they come, whole characters only."""

from codecs import getincrementaldecoder
from collections.abc import Sequence

from services.gateway.text.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

# Tokens that are decoded together with the next one: at most three hold the bytes of an unfinished character, one more
# stands before them, because decoders treat the first token of a text in a way of its own.
_CONTEXT_TOKENS = 4

_UTF8 = getincrementaldecoder("utf-8")


class Detokenizer:
    """The text of one stream of tokens.

    The answers of all pushes and of finish, joined, are what decoding all ids at once gives. An answer is final: text
    is held back as long as another token could change it, and no longer. That is an unfinished character or, where
    the tokenizer has byte fallback, a run of byte tokens up to its end, since one bad byte spoils the whole run.
    A token costs the same however long the stream is.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []  # the last tokens
        self._sent = 0  # characters of the window's text that have been given out
        self._run = _ByteRun()

    def push(self, ids: Sequence[int]) -> str:
        """Take the next ids; return the text that is now certain, maybe none."""
        return "".join([self._push(token_id) for token_id in ids if self._is_shown(token_id)])

    def finish(self) -> str:
        """Return the text still held back. Bytes that never became a character are U+FFFD."""
        text = self._window_text()
        rest, self._sent = text[self._sent :], len(text)
        return rest

    def _is_shown(self, token_id: int) -> bool:
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            return False
        return self._tokenizer.exists(token_id)

    def _push(self, token_id: int) -> str:
        byte = self._tokenizer.byte_of(token_id)
        if byte is not None:
            return self._push_byte(token_id, byte)
        self._run = _ByteRun()
        self._window.append(token_id)
        return self._release()

    def _push_byte(self, token_id: int, byte: int) -> str:
        spoiled = self._run.push(byte)
        if not spoiled:
            self._window.append(token_id)
            return ""
        # What the run will show is known. Its last byte stays, as context for the token that follows.
        self._window = [token_id]
        self._sent = len(self._window_text())
        return _REPLACEMENT * spoiled

    def _release(self) -> str:
        text = self._window_text()
        end = len(text) - self._undecided(text)
        fresh, self._sent = text[self._sent : end], end
        self._shorten_window(held=len(text) - end)
        return fresh

    def _undecided(self, text: str) -> int:
        """Characters at the end of the window's text that more bytes could change. One U+FFFD stands for them all."""
        return int(not self._tokenizer.has_byte_fallback and text.endswith(_REPLACEMENT))

    def _shorten_window(self, held: int) -> None:
        if len(self._window) >= 2 * _CONTEXT_TOKENS:
            self._window = self._window[-_CONTEXT_TOKENS:]
            self._sent = len(self._window_text()) - held

    def _window_text(self) -> str:
        return self._tokenizer.decode(self._window, self._skip_special_tokens)


class _ByteRun:
    """Byte tokens in a row. Together they become text or, when they are not UTF-8, one U+FFFD for each of them."""

    def __init__(self) -> None:
        self._utf8 = _UTF8()
        self._length = 0
        self._is_spoiled = False

    def push(self, byte: int) -> int:
        """Take a byte; return how many more U+FFFD the run is now known to show, 0 while it can become text."""
        self._length += 1
        if self._is_spoiled:
            return 1
        self._is_spoiled = not self._accepts(byte)
        return self._length if self._is_spoiled else 0

    def _accepts(self, byte: int) -> bool:
        try:
            self._utf8.decode(bytes([byte]))
        except UnicodeDecodeError:
            return False
        return True
