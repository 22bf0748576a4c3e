"""The blocks of one tier (device or host memory): the state, reference count and key of each.

Every id from 1 to `total` is in exactly one state:

    free      reference count 0, no key   in the free list; handed out first, in order of release
    cached    reference count 0, keyed    in the cached queue; handed out next, least recently released first
    held      reference count above 0     in no queue
    withheld  permanently unused          marked; a held block that is to be withheld on release is marked too

The two queues together are the eviction order. A block keeps its key (and the memory its contents) until it is handed
out again.

A pool calls these methods thousands of times a second; those that take many blocks at once are the fast ones. No
structure here grows by copying all its entries, because at a million blocks that would block the event loop.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from blocks import counted
from kvmanager.errors import OutOfBlocks
from kvmanager.tier.cached_queue import CachedQueue
from kvmanager.tier.fault import BlockFault
from kvmanager.tier.free_list import FreeList
from kvmanager.tier.key_index import KeyIndex
from kvmanager.tier.marks import UNINDEXED, WITHHELD, WITHHOLD_ON_RELEASE, BlockMarks

# Entries that are processed without a pause: well below a millisecond.
_SLICE = 1000
# Blocks that a tier grows by at a time.
_GROWTH = 20_000


class BlockCounts(NamedTuple):
    """Number of blocks of a tier in each state; the four sum to its size."""

    free: int
    cached: int
    held: int
    withheld: int = 0

    @property
    def available(self) -> int:
        """Blocks that can be handed out now."""
        return self.free + self.cached


class Seal(NamedTuple):
    """A block and its new key."""

    block: int
    key: bytes


class Eviction(NamedTuple):
    """A keyed block that was handed out again, and its former key."""

    block: int
    key: bytes


class Tier:
    """Moves the blocks of one tier between their states; queues, keys and marks keep the records.

    Every operation is O(1) per block, except that eviction searches the other blocks with the same key.
    """

    def __init__(self, total: int, *, incomplete: bool = False) -> None:
        """Start with blocks 1 to `total`, all free, in that order. Block 0 is never used.

        An `incomplete` tier starts without blocks: the adoption of a report runs `growing`, then puts every block into
        its state.
        """
        self.total = total
        self.shared = 0  # blocks with a reference count above 1
        self.saved = 0  # holders beyond the first, summed over blocks
        self._ref_counts = [0]  # table entries and pins that hold each block
        self.marks = BlockMarks(total)
        self.keys = KeyIndex(total, self.marks)
        self.free = FreeList()
        self.cached = CachedQueue()
        self.evictions: list[Eviction] = []  # since the last `take_evictions`
        if not incomplete:
            for _ in self.growing():
                pass
            self.free.extend(range(1, total + 1))

    @property
    def counts(self) -> BlockCounts:
        """Blocks by state."""
        free = len(self.free)
        cached, withheld = self.cached.size, self.marks.withheld_count
        return BlockCounts(free, cached, self.total - free - cached - withheld, withheld)

    @property
    def available(self) -> int:
        """Blocks that `grant` can hand out now."""
        return len(self.free) + self.cached.size

    def ref_count(self, block: int) -> int:
        """Return the number of table entries and pins that hold the block."""
        return self._ref_counts[block]

    def key(self, block: int) -> bytes | None:
        """Return the block's key, None if it has none."""
        return self.keys.by_block[block]

    def eviction_order(self) -> list[int]:
        """Return the free and cached blocks in the order in which they will be handed out."""
        return [*self.free.in_order(), *self.cached]

    def take_evictions(self) -> list[Eviction]:
        """Return and clear the evictions since the last call."""
        evictions, self.evictions = self.evictions, []
        return evictions

    def grant(self) -> int:
        """Hand out the next block with reference count 1, without its key. Raises OutOfBlocks when none is left."""
        block = self.free.take()
        if not block:
            block = self.cached.first
            if not block:
                raise OutOfBlocks(f"none of the {counted(self.total, 'block')} is available")
            self.cached.remove(block)
            self.evictions.append(Eviction(block, self.keys.remove(block)))
        self._ref_counts[block] = 1
        return block

    def grant_many(self, count: int) -> list[int]:
        """Hand out the next `count` blocks. The caller has checked that there are enough."""
        if count > len(self.free):
            return [self.grant() for _ in range(count)]
        blocks = self.free.take_many(count)
        counts = self._ref_counts
        for block in blocks:
            counts[block] = 1
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a holder to each block; cached blocks leave the eviction order and rejoin its end on release."""
        counts = self._ref_counts
        for block in blocks:
            count = counts[block]
            if count:
                self.saved += 1
                self.shared += count == 1
            else:
                self.cached.remove(block)
            counts[block] = count + 1

    def enqueue(self, blocks: Iterable[int]) -> None:
        """Append blocks that have no state yet to the free list or, if keyed, to the cached queue."""
        for block in blocks:
            (self.free if self.keys.by_block[block] is None else self.cached).extend((block,))

    def add_holders(self, blocks: Iterable[int]) -> None:
        """Count a holder of each block without changing the queues."""
        for block in blocks:
            count = self._ref_counts[block]
            self._ref_counts[block] = count + 1
            self.saved += count > 0
            self.shared += count == 1

    def set_sums(self, shared: int, saved: int) -> None:
        """Set the sums over the reference counts to the values that an audit computed."""
        self.shared, self.saved = shared, saved

    def touch(self, block: int) -> None:
        """Move a cached block to the end of the eviction order; held blocks do not change."""
        if not self._ref_counts[block]:
            self.cached.remove(block)
            self.cached.extend((block,))

    def release(self, blocks: Iterable[int]) -> None:
        """Remove a holder of each block, in this order; at reference count 0 a block joins the end of its queue."""
        counts, keys, any_marked = self._ref_counts, self.keys.by_block, self.marks.marked_count
        empty, cached = [], []
        for block in blocks:
            count = counts[block]
            if count == 1:
                counts[block] = 0
                if any_marked and self._withhold_marked(block):
                    continue
                if keys[block] is None:
                    empty.append(block)
                else:
                    cached.append(block)
            else:
                counts[block] = count - 1
                self.saved -= 1
                self.shared -= count == 2
        if empty:
            self.free.extend(empty)
        if cached:
            self.cached.extend(cached)

    def _withhold_marked(self, block: int) -> bool:
        """Clear the key of a released block that is marked; return whether it is withheld now."""
        mark = self.marks.by_block[block]
        if mark:
            self.keys.clear(block)
            self.marks.set(block, WITHHELD if mark & WITHHOLD_ON_RELEASE else 0)
        return bool(mark & WITHHOLD_ON_RELEASE)

    def cache_free_block(self, key: bytes) -> int:
        """Make the next free block a cached one with `key`. The caller has checked that there is a free block."""
        block = self.free.take()
        self.keys.seal(block, key)
        self.cached.extend((block,))
        return block

    def resetting_keys(self) -> Iterator[int]:
        """Empty the index: cached blocks become free, in their order; held blocks keep their keys, unindexed.

        A held block keeps its key until its last holder releases it, because keyed blocks must not be overwritten.
        Yields the units of work after every slice. The tier must not change otherwise before the end.
        """
        for start in range(0, self.cached.size, _SLICE):
            if start:
                yield 2 * _SLICE
            for _ in range(min(_SLICE, self.cached.size)):
                block = self.cached.first
                self.cached.remove(block)
                self.keys.remove(block)
                self.free.extend((block,))
        yield from self.keys.unindexing()

    # An audit withholds rarely, so it may search the whole free list.

    def withhold(self, holders: Mapping[int, int]) -> None:
        """Take blocks out of circulation and out of the index, those with holders on release.

        `holders` maps each block to its true number of holders. The records of these blocks may be wrong before; they
        are corrected.
        """
        for block, count in holders.items():
            self.free.remove(block)
            if block in self.cached:
                self.cached.remove(block)
            self.withhold_unqueued(block, count)

    def withhold_unqueued(self, block: int, holders: int) -> None:
        """Withhold a block that is in no queue: held, or without a state yet."""
        self.keys.unindex(block)
        self._ref_counts[block] = holders
        if holders:
            self.marks.set(block, UNINDEXED | WITHHOLD_ON_RELEASE)
        else:
            self.keys.clear(block)
            self.marks.set(block, WITHHELD)

    # Memory.

    def growing(self) -> Iterator[None]:
        """Allocate the records of all blocks, with pauses, because allocating fresh memory takes long."""
        while (missing := self.total + 1 - len(self._ref_counts)) > 0:
            some = min(missing, _GROWTH)
            self._ref_counts += [0] * some
            self.keys.grow(some)
            self.cached.grow(some)
            yield

    def dismantle(self) -> Iterator[None]:
        """Free the memory of a tier that is no longer used, in slices, because freeing all at once takes long."""
        self.free.clear()
        while self._ref_counts:
            del self._ref_counts[-_SLICE:]
            yield
        yield from self.keys.clearing(_SLICE)
        yield from self.cached.clearing(_SLICE)

    # Checks.

    def block_faults(self, block: int, holders: int) -> list[BlockFault]:
        """Check a block against its true number of holders. The free list is checked by `free_faults`."""
        count, key, mark = self._ref_counts[block], self.keys.by_block[block], self.marks.by_block[block]
        cached, withheld, unindexed = block in self.cached, mark == WITHHELD, mark & UNINDEXED
        faults = []
        if count != holders:
            faults.append(f"block {block} has reference count {count} but {counted(holders, 'holder')}")
        if (count != 0) + cached + withheld > 1:
            states = f"reference count {count}, {'' if cached else 'not '}cached, {'' if withheld else 'not '}withheld"
            faults.append(f"block {block} has several states: {states}")
        if cached and not self.cached.is_linked(block):
            faults.append(f"block {block} is linked wrongly in the cached queue")
        if cached and key is None:
            faults.append(f"block {block} is cached without a key")
        if key is not None and not (count or cached):
            faults.append(f"block {block} has a key but is neither held nor cached")
        if unindexed and not count:
            faults.append(f"block {block} is marked as held and unindexed, but is not held")
        if mark & WITHHOLD_ON_RELEASE and not unindexed:
            faults.append(f"block {block} is to be withheld on release, but is not marked as unindexed")
        return [BlockFault(block, fault) for fault in faults] + self.keys.block_faults(block)

    def free_faults(self) -> list[BlockFault]:
        """Check the free list, and that no block is without a state. Takes time by the size of the tier."""
        faults, seen = [], set()
        counts, keys, marks = self._ref_counts, self.keys.by_block, self.marks.by_block
        for block in self.free.in_order():
            if block in seen or counts[block] or keys[block] is not None or marks[block]:
                faults.append(BlockFault(block, f"block {block} is in the free list but must not be"))
            seen.add(block)
        for block in range(1, self.total + 1):
            has_state = counts[block] or block in self.cached or marks[block] or block in seen
            if not has_state:
                faults.append(BlockFault(block, f"block {block} is neither free nor cached, held or withheld"))
        return faults

    def violations(self, holders: dict[int, int]) -> list[str]:
        """Check the tier against `holders`, the table entries and pins per block; return a message for each fault."""
        faults = [
            fault for block in range(1, self.total + 1) for fault in self.block_faults(block, holders.get(block, 0))
        ]
        faults += self.free_faults()
        messages = [message for _, message in faults]
        for part in (self.keys, self.cached, self.marks):
            messages += part.violations()
        saved = sum(count - 1 for count in self._ref_counts if count)
        shared = sum(count > 1 for count in self._ref_counts)
        if self.saved != saved:
            messages.append(f"saved is {self.saved}, but the reference counts give {saved}")
        if self.shared != shared:
            messages.append(f"shared is {self.shared}, but the reference counts give {shared}")
        return messages
