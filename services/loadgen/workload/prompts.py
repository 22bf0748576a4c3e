"""Prompts as lists of pieces. A piece's tokens are determined by its name, so equal names give equal tokens."""

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]

# Token ids below this one are often special tokens.
_FIRST_IDS = 256
_LAST_IDS_DIVISOR = 64
_KEPT_PIECES = 1024

# For servers that accept only text: most tokenizers encode each with its leading space as one token.
_TEXT = """
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother area
money story fact month lot right study book eye job word business issue side kind head house service friend father
power hour game line end member law car city community name president team minute idea body information back parent
face others level office door health person art war history party result change morning reason research girl guy
moment air teacher force education foot boy age policy music market sense nation plan college interest death
experience effect use class control field development role effort rate heart drug show leader light voice wife
police mind price report decision son view relationship town road arm
"""
WORDS = tuple(_TEXT.split())


class Kind(IntEnum):
    """The kind of a piece, the first number of its name."""

    UNIQUE = 0
    PREFIX = 1
    BLOCK = 2


@dataclass(frozen=True)
class Piece:
    """The first `tokens` tokens of the sequence with this name: a kind, then numbers from 0."""

    name: tuple[int, ...]
    tokens: int


Prompt = tuple[Piece, ...]


def length(prompt: Prompt) -> int:
    """Return the number of tokens of a prompt."""
    return sum(piece.tokens for piece in prompt)


class PromptMaker:
    """Makes the tokens of prompts. Another seed gives other tokens, with the same lengths and shared prefixes."""

    def __init__(self, seed: int, vocabulary_size: int) -> None:
        self._seed = seed
        # Special tokens mostly have the first ids or the last.
        self._low = min(_FIRST_IDS, vocabulary_size // 4)
        self._high = vocabulary_size - vocabulary_size // _LAST_IDS_DIVISOR
        # Shared pieces are cached; those of one prompt are not.
        self._shared = lru_cache(_KEPT_PIECES)(self._drawn)

    def token_ids(self, prompt: Prompt) -> list[int]:
        """Return a prompt's tokens."""
        ids: list[int] = []
        for piece in prompt:
            drawn = self._drawn(piece) if piece.name[0] == Kind.UNIQUE else self._shared(piece)
            ids += drawn.tolist()
        return ids

    def text(self, prompt: Prompt) -> str:
        """Return a word for each token, for servers that accept only text."""
        return " ".join(WORDS[token % len(WORDS)] for token in self.token_ids(prompt))

    def _drawn(self, piece: Piece) -> Tokens:
        draw = np.random.default_rng([self._seed, *piece.name])
        return draw.integers(self._low, self._high, piece.tokens, dtype=np.int32)
