"""The blocks of one tier (device or host memory): who is free, who is cached, who is held, and under which key.

Every id from 1 to `total` is in exactly one place:

    free    count 0, no key       in `_free`, handed out first, in order of release
    cached  count 0, with a key   in `_cached`, handed out next, least recently released first
    held    count above 0         in `_counts` alone

So the two queues together are the eviction order. A block keeps its key (and the memory its contents) until it is
handed out again. Several blocks may carry one key, because tables are append-only and are never rewritten to a twin;
the index answers with the one sealed first.
"""

from collections import OrderedDict
from typing import NamedTuple

from kvmanager.errors import OutOfBlocks


class BlockCounts(NamedTuple):
    """How many blocks of a tier are in each state; the four sum to its size."""

    free: int
    cached: int
    held: int
    withheld: int = 0

    @property
    def available(self) -> int:
        """Blocks that can be handed out now."""
        return self.free + self.cached


class Tier:
    """Counts, keys and eviction order of the blocks of one tier.

    Every operation is O(1) a block, but evicting a block looks at the others that carry its key.
    """

    def __init__(self, total: int) -> None:
        """Start with blocks 1 to `total`, all free, in that order. Block 0 belongs to nobody."""
        self.total = total
        self.shared = 0  # blocks with count above 1
        self.saved = 0  # holders beyond the first, summed over blocks
        self.evicted = 0  # keyed blocks handed out again, ever
        self._counts = [0] * (total + 1)
        self._keys: list[bytes | None] = [None] * (total + 1)
        self._index: dict[bytes, list[int]] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, total + 1))
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def counts(self) -> BlockCounts:
        """Blocks by state."""
        free, cached = len(self._free), len(self._cached)
        return BlockCounts(free, cached, self.total - free - cached)

    @property
    def available(self) -> int:
        """Blocks that `grant` can hand out now."""
        return len(self._free) + len(self._cached)

    def count(self, block: int) -> int:
        """Return how many table entries and pins hold the block."""
        return self._counts[block]

    def key(self, block: int) -> bytes | None:
        """Return the block's key, None while it has none."""
        return self._keys[block]

    def find(self, key: bytes) -> int | None:
        """Return the block sealed first under `key`, None if there is none. Reserves nothing."""
        blocks = self._index.get(key)
        return blocks[0] if blocks else None

    def eviction_order(self) -> list[int]:
        """Return the blocks at count 0 in the order in which they will be handed out."""
        return [*self._free, *self._cached]

    def grant(self) -> int:
        """Hand out the next block at count 1, forgetting its key. Raises OutOfBlocks when none is left."""
        if self._free:
            block, _ = self._free.popitem(last=False)
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self._forget_key(block)
            self.evicted += 1
        else:
            raise OutOfBlocks(f"none of {self.total} blocks is free")
        self._counts[block] = 1
        return block

    def hold(self, block: int) -> None:
        """Add a holder; a cached block leaves the eviction order, which is how a hit refreshes it."""
        if self._counts[block]:
            self.saved += 1
            self.shared += self._counts[block] == 1
        else:
            del self._cached[block]
        self._counts[block] += 1

    def release(self, block: int) -> None:
        """Take a holder away; at count 0 the block joins the end of its queue."""
        self._counts[block] -= 1
        if self._counts[block]:
            self.saved -= 1
            self.shared -= self._counts[block] == 1
        elif self._keys[block] is None:
            self._free[block] = None
        else:
            self._cached[block] = None

    def seal(self, block: int, key: bytes) -> None:
        """Give a held block its key. It becomes the index's answer unless an earlier block carries the same key."""
        self._keys[block] = key
        self._index.setdefault(key, []).append(block)

    def _forget_key(self, block: int) -> None:
        key = self._keys[block]
        assert key is not None, "only keyed blocks are forgotten"
        self._keys[block] = None
        carriers = self._index[key]
        carriers.remove(block)
        if not carriers:
            del self._index[key]

    def violations(self, holders: dict[int, int]) -> list[str]:
        """Check the tier against `holders`, the table entries and pins counted by block; a sentence for each fault."""
        faults = []
        if self._free.keys() & self._cached.keys():
            faults.append("a block is both free and cached")
        for block in range(1, self.total + 1):
            faults += self._block_violations(block, holders.get(block, 0))
        indexed = {block for carriers in self._index.values() for block in carriers}
        keyed = {block for block, key in enumerate(self._keys) if key is not None}
        if indexed != keyed:
            faults.append(f"index and keys differ for blocks {sorted(indexed ^ keyed)}")
        if self.saved != sum(count - 1 for count in self._counts if count):
            faults.append(f"saved is {self.saved}, counts say otherwise")
        if self.shared != sum(count > 1 for count in self._counts):
            faults.append(f"shared is {self.shared}, counts say otherwise")
        return faults

    def _block_violations(self, block: int, holders: int) -> list[str]:
        count, key = self._counts[block], self._keys[block]
        free, cached = block in self._free, block in self._cached
        faults = []
        if count != holders:
            faults.append(f"block {block} has count {count} but {holders} holders")
        if (free or cached) != (count == 0):
            faults.append(f"block {block} of count {count} is {'' if free or cached else 'not '}in the eviction order")
        if (free and key is not None) or (cached and key is None):
            faults.append(f"block {block} is in the queue of blocks {'without' if free else 'with'} a key")
        return faults
