"""The keys `tokenizer.*` and `general.*` of a GGUF file, each with its type and bounds.

They are described in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A key of another type, or an id beyond
the vocabulary, is refused by its name: llama.cpp takes a default instead, which is another file's token.
"""

from collections import Counter
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from engine.errors import ModelUnsupported
from engine.native.formats.gguf.arrays import read_bytes, read_numbers, read_texts
from engine.native.formats.gguf.header import GgufHeader, read_header

TOKENS, TYPES, SCORES, MERGES = (f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "scores", "merges"))
MODEL, CHARSMAP = "tokenizer.ggml.model", "tokenizer.ggml.precompiled_charsmap"
TEMPLATE = "tokenizer.chat_template"
_MOST_TOKENS, _MOST_TOKEN_CHARACTERS = 1 << 20, 4096


_Scalar = TypeVar("_Scalar", str, bool, int)


# In files of converters that did not set a type.
_UNDEFINED = 0


class TokenType(IntEnum):
    """What a token is. Unused tokens are in the vocabulary, and no text has them."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class TokenizerMetadata:
    """A file's vocabulary: token i has the text `tokens[i]`, a type, and a score unless the file has none."""

    path: Path
    header: GgufHeader
    tokens: list[str]
    types: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float64] | None

    @property
    def model(self) -> str:
        """The kind of vocabulary: gpt2, llama, t5, bert and others."""
        return self.text(MODEL) or ""

    def text(self, key: str) -> str | None:
        """Return a text, None if the file has none under this key. Raises ModelUnsupported for another type."""
        return self._value(key, str, "a text")

    def flag(self, name: str, default: bool) -> bool:
        """Return a truth value of `tokenizer.ggml`. Raises ModelUnsupported for another type."""
        found = self._value(f"tokenizer.ggml.{name}", bool, "true or false")
        return default if found is None else found

    def token(self, name: str, default: int | None = None) -> int | None:
        """Return the id of a token under `tokenizer.ggml.NAME_token_id`, the default if the vocabulary has it.

        Raises ModelUnsupported for another type than a whole number, and for an id beyond the vocabulary.
        """
        key, size = f"tokenizer.ggml.{name}_token_id", len(self.tokens)
        found = self._value(key, int, f"the id of one of its {size} tokens")
        if found is None:
            return default if default is not None and default < size else None
        if found not in range(size):
            raise ModelUnsupported(f"its {key} is {found}, but it has {size} tokens")
        return found

    def merges(self) -> list[tuple[str, str]] | None:
        """Read the pairs that BPE merges, the first to be merged first; None if the file has none."""
        found = read_texts(self.path, self.header, MERGES)
        return None if found is None else [_pair(at, text) for at, text in enumerate(found)]

    def charsmap(self) -> bytes:
        """Read the map of a SentencePiece normalizer, empty if the file has none."""
        return read_bytes(self.path, self.header, CHARSMAP)

    def of_type(self, *types: TokenType) -> list[int]:
        """Return the ids of the tokens of these types."""
        return [int(one) for one in np.flatnonzero(np.isin(self.types, types))]

    def _value(self, key: str, kind: type[_Scalar], wanted: str) -> _Scalar | None:
        found: _Scalar | None = self.header.metadata.get(key)
        if key in self.header.arrays:
            raise ModelUnsupported(f"its {key} is an array, not {wanted}")
        if found is not None and type(found) is not kind:
            raise ModelUnsupported(f"its {key} is {str(found)[:80]!r}, not {wanted}")
        return found


def read_metadata(path: Path) -> TokenizerMetadata:
    """Read a file's vocabulary. Raises ModelUnsupported, with the key, if it has none or a damaged one."""
    header = read_header(path)
    tokens = read_texts(path, header, TOKENS)
    if not tokens or len(tokens) > _MOST_TOKENS:
        raise ModelUnsupported(f"its {TOKENS} has {len(tokens or ())} tokens, not 1 to {_MOST_TOKENS}")
    tokens = [text or f"[EMPTY_{at}]" for at, text in enumerate(tokens)]  # as llama.cpp calls them
    _check_texts(tokens)
    return TokenizerMetadata(path, header, tokens, _types(path, header, len(tokens)), _scores(path, header, tokens))


def _check_texts(tokens: list[str]) -> None:
    longest = max(range(len(tokens)), key=lambda at: len(tokens[at]))
    if len(tokens[longest]) > _MOST_TOKEN_CHARACTERS:
        size = len(tokens[longest])
        raise ModelUnsupported(f"its {TOKENS}[{longest}] has {size} characters, more than {_MOST_TOKEN_CHARACTERS}")
    text, count = Counter(tokens).most_common(1)[0]
    if count > 1:
        raise ModelUnsupported(f"its {TOKENS} has {text[:80]!r} {count} times")


def _types(path: Path, header: GgufHeader, count: int) -> npt.NDArray[np.int64]:
    found = read_numbers(path, header, TYPES, "iu")
    if found is None:
        return np.full(count, TokenType.NORMAL, np.int64)
    _check_count(TYPES, len(found), count)
    unknown = np.flatnonzero((found < _UNDEFINED) | (found > max(TokenType)))
    if len(unknown):
        at = int(unknown[0])
        raise ModelUnsupported(f"its {TYPES}[{at}] is {found[at]}, and no type of tokens has this number")
    return found.astype(np.int64)


def _scores(path: Path, header: GgufHeader, tokens: list[str]) -> npt.NDArray[np.float64] | None:
    found = read_numbers(path, header, SCORES, "iuf")
    if found is None:
        return None
    _check_count(SCORES, len(found), len(tokens))
    wrong = next((at for at in np.flatnonzero(~np.isfinite(found))), None)
    if wrong is not None:
        raise ModelUnsupported(f"its {SCORES}[{wrong}] is {found[wrong]}, not a number")
    return found.astype(np.float64)


def _check_count(key: str, found: int, tokens: int) -> None:
    if found != tokens:
        raise ModelUnsupported(f"its {key} has {found} elements for {tokens} tokens")


def _pair(at: int, text: str) -> tuple[str, str]:
    space = text.find(" ", 1)  # a token may begin with a space
    if space < 0 or space == len(text) - 1:
        raise ModelUnsupported(f"its {MERGES}[{at}] is {text[:80]!r}, not two tokens with a space between")
    return text[:space], text[space + 1 :]
