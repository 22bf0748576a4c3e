"""Tracks prefixes that are being computed, so that equal prompts that arrive together compute them once.

A running group claims the full blocks of its prompt that it still has to compute. A waiting group whose next blocks are
claimed waits for their commit and then hits them in the prefix cache. It waits only for a group before it in the order,
or one of its priority that was admitted before it came: requests reach the engine in another order than the gateway,
and the order is that of the gateway. Meanwhile the owner takes the place of the first that waits for it (`PrefillOrder`
does this), so nobody waits longer than computing these blocks itself would take. Blocks that `CachedPrefixes` has are
not claimed, and nobody waits for them.

Blocks are identified by a chained hash of their tokens: Python's, which takes less than half the time of a block key. A
collision only delays a request. It never shares blocks wrongly, because the block manager has its own keys.
"""

from collections.abc import Sequence as Items
from typing import NamedTuple

from engine.schedule.pool.cached_prefixes import CachedPrefixes, chained_hashes
from engine.schedule.sequence_group import Group, Sequence


class Awaited(NamedTuple):
    """What waiting groups expect of an owner: its leading tokens, and the key of the first of them in the order."""

    tokens: int
    key: tuple[float, ...]


class PrefixClaims:
    """Claims of running groups on the full blocks of their prompts. Without `caching` there are none."""

    def __init__(self, block_size: int, *, caching: bool = True) -> None:
        self.cached = CachedPrefixes()
        self._caching = caching
        self._block_size = block_size
        self._owners: dict[int, Group] = {}
        self._awaited: dict[Group, Awaited] = {}

    # Owners.

    def claim(self, group: Group) -> None:
        """Claim each full block of a prompt that is not cached and that no other group claims."""
        links = self._links_of(group)
        self._own(group, links[len(self.cached.find(links)) :])

    def claim_rest(self, group: Group) -> None:
        """Claim what a group has not committed yet: it was swapped out during its prefill, and is swapped in."""
        self._own(group, self._links_of(group)[group.trunk.committed :])

    def on_cached(self, group: Group, blocks: int) -> None:
        """Record that the first `blocks` blocks of a group's first allocation were cached, and the next one was not."""
        self.cached.forget_links(self._shareable(group)[blocks:])
        self._own(group, self._links_of(group)[blocks:])
        self.on_commit(group.trunk, 0, blocks)

    def on_commit(self, sequence: Sequence, first: int, end: int) -> None:
        """Record that blocks `first` to `end` of a sequence have keys now."""
        links = self._links_of(sequence.group)[first:end]
        for link, block in zip(links, sequence.table[first:end], strict=False):
            self.cached.record(link, block)
        self._disown(sequence.group, links)

    def release_all(self, group: Group) -> None:
        """Release all claims of a group that no longer runs."""
        self._disown(group, self._links_of(group))
        self._awaited.pop(group, None)

    def _own(self, group: Group, links: Items[int]) -> None:
        for link in links:
            self._owners.setdefault(link, group)

    def _disown(self, group: Group, links: Items[int]) -> None:
        for link in links:
            if self._owners.get(link) is group:
                del self._owners[link]

    def forget_cached(self) -> None:
        """Forget which blocks are cached."""
        self.cached.clear()

    # Waiting groups.

    def cached_blocks(self, group: Group) -> list[int]:
        """Return the blocks that the first allocation of a group is expected to hit."""
        return self.cached.find(self._shareable(group))

    def cached_tokens(self, group: Group) -> int:
        """Return the tokens that the first allocation of a group is expected to hit."""
        return len(self.cached_blocks(group)) * self._block_size

    def awaited_owner(self, group: Group) -> Group | None:
        """Return the group that computes a block which this one could share and waits for, None if there is none."""
        if not self._owners:
            return None
        links = self._shareable(group)
        first = len(self.cached.find(links))
        owner = self._owners.get(links[first]) if first < len(links) else None
        if owner is None or owner is group:
            return None
        return owner if owner.key < group.key or owner.request.priority == group.request.priority else None

    def expect(self, owner: Group, group: Group) -> None:
        """Record that a group waits for the blocks that `owner` computes."""
        links = self._shareable(group)
        shared = len(self.cached.find(links)) + sum(self._owners.get(link) is owner for link in links)
        tokens = shared * self._block_size
        before = self._awaited.get(owner, Awaited(tokens, group.key))
        self._awaited[owner] = Awaited(max(tokens, before.tokens), min(group.key, before.key))

    def clear_expected(self) -> None:
        """Forget which blocks other groups wait for."""
        self._awaited.clear()

    def awaited(self, group: Group) -> Awaited | None:
        """Return what other groups wait for that this one computes, None if there is nothing."""
        return self._awaited.get(group)

    def _shareable(self, group: Group) -> list[int]:
        # At least one token must be computed, so a block that ends with the last token is never shared.
        return self._links_of(group)[: (group.common - 1) // self._block_size]

    def _links_of(self, group: Group) -> list[int]:
        """Return the links of a prompt, hashed once."""
        if not self._caching:
            return []
        if group.links is None:
            group.links = chained_hashes(group.salt, group.request.prompt, self._block_size)
        return group.links
