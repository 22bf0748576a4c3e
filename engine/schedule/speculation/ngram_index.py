"""Proposes the continuation of a sequence from its own tokens.

Prompt lookup (Saxena, Prompt Lookup Decoding, 2023): where the last tokens of a sequence occurred before, the tokens
that followed them are proposed. The longest match wins, and of equal ones the latest.
"""

from array import array
from typing import NamedTuple

# Tokens of a match. One token alone occurs everywhere; more than four seldom match where four do not.
MATCHES = (4, 3, 2)
_LEAST_SLOTS, _MOST_SLOTS = 1 << 8, 1 << 15
_SLOTS_PER_TOKEN = 4  # of the longest sequence: one for each match length, and some that stay empty


class Draft(NamedTuple):
    """Proposed tokens, and the number of tokens that matched before them."""

    token_ids: tuple[int, ...]
    match: int


class NgramIndex:
    """The latest place of each n-gram of one sequence; O(1) for each token, at most 128 KiB.

    The table has no chains: an n-gram replaces another with the same slot. So a match may be missed, as are n-grams of
    a context that is far longer than the table; a lookup compares the tokens themselves.
    """

    def __init__(self, longest: int, least: int = MATCHES[-1]) -> None:
        """Start empty. `longest` is the most tokens that the sequence can have, `least` the fewest of a match."""
        self._matches = tuple(match for match in MATCHES if match >= least)
        slots = min(max(_LEAST_SLOTS, 1 << (longest * _SLOTS_PER_TOKEN - 1).bit_length()), _MOST_SLOTS)
        self._ends = array("i", bytes(array("i").itemsize * slots))  # where each n-gram ends; 0: an empty slot
        self._mask = slots - 1
        self._indexed = 0  # tokens whose n-grams are in the table

    def draft(self, tokens: list[int], most: int) -> Draft | None:
        """Return at most `most` tokens that may follow `tokens`, None if their end has not occurred before.

        `tokens` continue those of the call before. A match so close to the end that it has too few tokens after it is
        taken to repeat.
        """
        self._advance(tokens)
        for match in self._matches:
            last = tokens[-match:]
            end = self._ends[hash(tuple(last)) & self._mask]
            if end >= match and tokens[end - match : end] == last:
                period = len(tokens) - end
                return Draft(tuple([tokens[end + place % period] for place in range(most)]), match)
        return None

    def _advance(self, tokens: list[int]) -> None:
        """Add the n-grams that end before the last token: the last ones would match themselves."""
        for end in range(self._indexed + 1, len(tokens)):
            for match in self._matches:
                if end >= match:
                    self._ends[hash(tuple(tokens[end - match : end])) & self._mask] = end
        self._indexed = max(self._indexed, len(tokens) - 1)
