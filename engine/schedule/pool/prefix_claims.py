"""Tracks prefixes that are being computed, so that equal prompts that arrive together compute them once.

A running group claims the full blocks of its prompt that it still has to compute. A waiting group whose next blocks are
claimed waits for their commit and then hits them in the prefix cache.

Blocks are identified by a chained hash of their tokens: Python's, which takes less than half the time of a block key,
because each turn hashes all waiting prompts. A collision only delays a request. It never shares blocks wrongly, because
the block manager has its own keys.
"""

from collections.abc import Iterator

from engine.schedule.sequence_group import Group


class PrefixClaims:
    """Claims of running groups on the full blocks of their prompts."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._owners: dict[int, int] = {}
        self._claims: dict[int, list[int]] = {}

    def claim(self, group: Group) -> None:
        """Claim each full block of the group's first allocation that no other group claims."""
        chain = list(self._chain(group))
        self._claims[group.id] = chain
        for link in chain:
            self._owners.setdefault(link, group.id)

    def release(self, group: Group, blocks: int) -> None:
        """Release the claims on the first `blocks` blocks, which have keys now."""
        for link in self._claims.get(group.id, ())[:blocks]:
            if self._owners.get(link) == group.id:
                del self._owners[link]

    def release_all(self, group: Group) -> None:
        """Release all claims of a group that no longer runs."""
        self.release(group, len(self._claims.get(group.id, ())))
        self._claims.pop(group.id, None)

    def conflicts(self, group: Group) -> bool:
        """Return whether another group is computing a block that this one could share."""
        return any(link in self._owners for link in self._chain(group))

    def _chain(self, group: Group) -> Iterator[int]:
        # At least one token must be computed, so a block that ends with the last token is never shared.
        size = self._block_size
        tokens = group.trunk_tokens
        link = hash(group.salt)
        for end in range(size, len(tokens), size):
            link = hash((link, *tokens[end - size : end]))
            yield link
