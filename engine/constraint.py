"""Languages that an output must belong to, as the engine sees them; whoever compiles them plugs in what follows one.

A mask is one plain value: a bit for each token of a vocabulary, the lowest bit of a byte first, set where the token can
follow. Tokens beyond its end cannot.
"""

from collections.abc import Iterable
from typing import Protocol


class ConstraintState(Protocol):
    """One output on its way through a language. Owned by the sequence whose tokens it is given."""

    @property
    def complete(self) -> bool:
        """Whether the output belongs to the language, and nothing can follow but its end. Asked after `allowed`."""

    def allowed(self) -> bytes:
        """Return the mask of what can follow; where the output may end, with the end-of-sequence tokens.

        Never empty: raises ConstraintFailed where nothing is left, or where finding out takes too much.
        """

    def advance(self, token_id: int) -> None:
        """Go on by a token. Raises ConstraintFailed where it cannot follow; the state is of no use then."""

    def copy(self) -> "ConstraintState":
        """Return a state that goes its own way from here."""


class Constraint(Protocol):
    """A language, compiled for the tokens of one vocabulary. It never changes, so requests can share it."""

    def start(self) -> ConstraintState:
        """Return the state of an empty output."""


def allows_any(mask: bytes, banned: Iterable[int]) -> bool:
    """Return whether a mask allows a token that is not banned."""
    bits = int.from_bytes(mask, "little")
    for token in banned:
        if 0 <= token < 8 * len(mask):  # beyond it, a number of as many bits would be made for nothing
            bits &= ~(1 << token)
    return bits != 0
