"""Who is computing which prefix: lets equal prompts that arrive together compute their common part once.

A running sequence claims the full blocks of its prompt that it still has to compute; a waiting one whose next blocks
are claimed waits for their commit and then finds them in the cache. Blocks are told apart by a chained hash of their
tokens. It is only a scheduling hint: a collision makes a request wait a little, never share wrongly, because the block
manager has keys of its own.
"""

from collections.abc import Iterator

from engine.request import Sequence


class PrefixClaims:
    """Claims of running sequences on the full blocks of their prompts."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._owners: dict[int, int] = {}
        self._claims: dict[int, list[int]] = {}

    def claim(self, sequence: Sequence) -> None:
        """Claim every full block of the sequence's tokens that nobody else claims."""
        chain = list(self._chain(sequence))
        self._claims[sequence.id] = chain
        for link in chain:
            self._owners.setdefault(link, sequence.id)

    def settle(self, sequence: Sequence, blocks: int) -> None:
        """Give up the claims on the first `blocks` blocks: they have keys now."""
        for link in self._claims.get(sequence.id, ())[:blocks]:
            if self._owners.get(link) == sequence.id:
                del self._owners[link]

    def withdraw(self, sequence: Sequence) -> None:
        """Give up all claims of a sequence that does not run any more."""
        self.settle(sequence, len(self._claims.get(sequence.id, ())))
        self._claims.pop(sequence.id, None)

    def blocks(self, sequence: Sequence) -> bool:
        """Return whether another sequence is computing a block that this one could share."""
        return any(link in self._owners for link in self._chain(sequence))

    def _chain(self, sequence: Sequence) -> Iterator[int]:
        # At least one token is left to compute, so the block that ends the tokens is never shared.
        size = self._block_size
        link = hash(sequence.request.salt)
        for end in range(size, len(sequence.tokens), size):
            link = hash((link, *sequence.tokens[end - size : end]))
            yield link
