"""Who is computing which prefix: lets equal prompts that arrive together compute their common part once.

A running group claims the full blocks of its prompt that it still has to compute; a waiting one whose next blocks
are claimed waits for their commit and then finds them in the cache. Blocks are distinguished by a chained hash of their
tokens: Python's, which takes less than half of the time of a block key, for all who wait are looked at in every turn.
It is only a scheduling hint: a collision makes a request wait a little, never share wrongly, because the block manager
has keys of its own.
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
        """Claim every full block of what the group begins with that nobody else claims."""
        chain = list(self._chain(group))
        self._claims[group.id] = chain
        for link in chain:
            self._owners.setdefault(link, group.id)

    def release(self, group: Group, blocks: int) -> None:
        """Give up the claims on the first `blocks` blocks: they have keys now."""
        for link in self._claims.get(group.id, ())[:blocks]:
            if self._owners.get(link) == group.id:
                del self._owners[link]

    def release_all(self, group: Group) -> None:
        """Give up all claims of a group that does not run any more."""
        self.release(group, len(self._claims.get(group.id, ())))
        self._claims.pop(group.id, None)

    def conflicts(self, group: Group) -> bool:
        """Return whether another group is computing a block that this one could share."""
        return any(link in self._owners for link in self._chain(group))

    def _chain(self, group: Group) -> Iterator[int]:
        # At least one token is left to compute, so the block that ends the tokens is never shared.
        size = self._block_size
        tokens = group.trunk_tokens
        link = hash(group.salt)
        for end in range(size, len(tokens), size):
            link = hash((link, *tokens[end - size : end]))
            yield link
