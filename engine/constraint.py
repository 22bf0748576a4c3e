"""Constraints on outputs (guided decoding). Compilers of constraints implement these protocols.

A mask has one bit for each token of a vocabulary, the lowest bit of a byte first. A set bit allows the token. Tokens
beyond the end of the mask are not allowed.
"""

from typing import Protocol


class ConstraintState(Protocol):
    """State of one output under its constraint. The sequence that receives the tokens owns it."""

    @property
    def complete(self) -> bool:
        """Whether the output is complete, so that only an end-of-sequence token may follow. Read after `allowed`."""

    def allowed(self) -> bytes:
        """Return the mask of tokens that may come next, including end-of-sequence tokens where the output may end.

        Never empty: raises ConstraintFailed if no token is left or if computing the mask exceeds its limits.
        """

    def advance(self, token_id: int) -> None:
        """Consume a token. Raises ConstraintFailed if the token may not follow; the state is unusable afterwards."""

    def copy(self) -> "ConstraintState":
        """Return an independent copy."""


class Constraint(Protocol):
    """A constraint compiled for one vocabulary. Immutable, so requests can share it."""

    def start(self) -> ConstraintState:
        """Return the state of an empty output."""
