"""The blocks of one tier (device or host memory): who is free, who is cached, who is held, and under which key.

Every id from 1 to `total` is in exactly one place:

    free      count 0, no key       in the free list, handed out first, in order of release
    cached    count 0, with a key   in the cached queue, handed out next, least recently released first
    held      count above 0         in no queue
    withheld  taken out for good    marked so; a held block that waits for that is marked too

So the two queues together are the eviction order. A block keeps its key (and the memory its contents) until it is
handed out again.

The verbs of a pool run through here thousands of times a second: the methods that take many blocks at once are the
fast ones. Nothing here grows by copying all it has, which at a million blocks would hold everybody up.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from kvmanager.errors import OutOfBlocks
from kvmanager.tier.cached_queue import CachedQueue
from kvmanager.tier.fault import BlockFault
from kvmanager.tier.free_list import FreeList
from kvmanager.tier.key_index import KeyIndex
from kvmanager.tier.marks import UNINDEXED, WITHHELD, WITHHOLD_ON_RELEASE, BlockMarks

# Entries that are looked at or given back without a pause: well below a millisecond.
_SLICE = 1000
# Blocks that a tier grows by in one go.
_GROWTH = 20_000


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


class Seal(NamedTuple):
    """A block, and the key that it was given."""

    block: int
    key: bytes


class Eviction(NamedTuple):
    """A keyed block that was handed out again, and the key that it lost."""

    block: int
    key: bytes


class Tier:
    """Moves the blocks of one tier between their places. What is kept of each block belongs to its parts.

    Every operation is O(1) a block, but evicting a block looks at the others that carry its key.
    """

    def __init__(self, total: int, *, incomplete: bool = False) -> None:
        """Start with blocks 1 to `total`, all free, in that order. Block 0 belongs to nobody.

        An `incomplete` tier begins without any block: whoever adopts a report lets it grow to its size, see `growing`,
        and puts each into its place.
        """
        self.total = total
        self.shared = 0  # blocks with count above 1
        self.saved = 0  # holders beyond the first, summed over blocks
        self._counts = [0]  # how many table entries and pins hold each block
        self.marks = BlockMarks(total)
        self.keys = KeyIndex(total, self.marks)
        self.free = FreeList()
        self.cached = CachedQueue()
        self.evictions: list[Eviction] = []  # since the list was last taken
        if not incomplete:
            for _ in self.growing():
                pass
            self.free.extend(range(1, total + 1))

    @property
    def counts(self) -> BlockCounts:
        """Blocks by state."""
        free = len(self.free.blocks) - self.free.head
        cached, withheld = self.cached.number, self.marks.withheld_number
        return BlockCounts(free, cached, self.total - free - cached - withheld, withheld)

    @property
    def available(self) -> int:
        """Blocks that `grant` can hand out now."""
        return len(self.free.blocks) - self.free.head + self.cached.number

    def count(self, block: int) -> int:
        """Return how many table entries and pins hold the block."""
        return self._counts[block]

    def key(self, block: int) -> bytes | None:
        """Return the block's key, None while it has none."""
        return self.keys.of[block]

    def eviction_order(self) -> list[int]:
        """Return the blocks at count 0 in the order in which they will be handed out."""
        return [*self.free.in_order(), *self.cached]

    def take_evictions(self) -> list[Eviction]:
        """Return the blocks that were evicted since the last call."""
        evictions, self.evictions = self.evictions, []
        return evictions

    def grant(self) -> int:
        """Hand out the next block at count 1, forgetting its key. Raises OutOfBlocks when none is left."""
        block = self.free.take()
        if not block:
            block = self.cached.first
            if not block:
                raise OutOfBlocks(f"none of {self.total} blocks is free")
            self.cached.leave(block)
            self.evictions.append(Eviction(block, self.keys.forget(block)))
        self._counts[block] = 1
        return block

    def grant_many(self, number: int) -> list[int]:
        """Hand out the next `number` blocks. The caller has checked that there are enough."""
        if number > len(self.free):
            return [self.grant() for _ in range(number)]
        blocks = self.free.take_many(number)
        counts = self._counts
        for block in blocks:
            counts[block] = 1
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a holder of each block; cached blocks leave the eviction order, which is how a hit refreshes them."""
        counts = self._counts
        for block in blocks:
            count = counts[block]
            if count:
                self.saved += 1
                self.shared += count == 1
            else:
                self.cached.leave(block)
            counts[block] = count + 1

    def queue(self, blocks: Iterable[int]) -> None:
        """Put blocks that are in no place yet at the ends of the queues."""
        for block in blocks:
            (self.free if self.keys.of[block] is None else self.cached).extend((block,))

    def count_holders(self, blocks: Iterable[int]) -> None:
        """Add a holder of each block, whoever it is and wherever the block was."""
        for block in blocks:
            count = self._counts[block]
            self._counts[block] = count + 1
            self.saved += count > 0
            self.shared += count == 1

    def correct_sums(self, shared: int, saved: int) -> None:
        """Set the sums over the counts to what an audit found."""
        self.shared, self.saved = shared, saved

    def touch(self, block: int) -> None:
        """Refresh a block without holding it: if it is cached, it is evicted last of all."""
        if not self._counts[block]:
            self.cached.leave(block)
            self.cached.extend((block,))

    def release(self, blocks: Iterable[int]) -> None:
        """Remove a holder of each block, in this order; at count 0 a block joins the end of its queue."""
        counts, keys, any_marked = self._counts, self.keys.of, self.marks.number
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
        """Remove the key of a block at count 0 that is marked; return whether it is out of circulation now."""
        mark = self.marks.of[block]
        if mark:
            self.keys.drop(block)
            self.marks.set(block, WITHHELD if mark & WITHHOLD_ON_RELEASE else 0)
        return bool(mark & WITHHOLD_ON_RELEASE)

    def park(self, key: bytes) -> int:
        """Turn the free block that would be handed out next into a cached one under `key`; there must be one."""
        block = self.free.take()
        self.keys.seal(block, key)
        self.cached.extend((block,))
        return block

    def forgetting_keys(self) -> Iterator[int]:
        """Empty the index: cached blocks become free, in their order; held ones keep their keys, but nobody finds them.

        A key says what may not be overwritten, so a held block has it until its last holder leaves. Pauses after every
        slice with its units of work; nothing else may happen to the tier before the end.
        """
        for start in range(0, self.cached.number, _SLICE):
            if start:
                yield 2 * _SLICE
            for _ in range(min(_SLICE, self.cached.number)):
                block = self.cached.first
                self.cached.leave(block)
                self.keys.forget(block)
                self.free.extend((block,))
        yield from self.keys.unindexing()

    # Withholding. It is rare: a block is looked for among all free ones.

    def withhold(self, holders: Mapping[int, int]) -> None:
        """Take blocks out of circulation: now, or once the last of its `holders` releases it. No key finds them again.

        It does not matter what is recorded of these blocks, or where they are: it is set right.
        """
        for block, count in holders.items():
            self.free.remove(block)
            if block in self.cached:
                self.cached.leave(block)
            self.take_out(block, count)

    def take_out(self, block: int, holders: int) -> None:
        """Withhold a block that is in no queue: in no place yet, or held."""
        self.keys.discard(block)
        self._counts[block] = holders
        if holders:
            self.marks.set(block, UNINDEXED | WITHHOLD_ON_RELEASE)
        else:
            self.keys.drop(block)
            self.marks.set(block, WITHHELD)

    # Memory.

    def growing(self) -> Iterator[None]:
        """Make room for what is recorded of each block, with pauses: fresh memory takes its time."""
        while (missing := self.total + 1 - len(self._counts)) > 0:
            some = min(missing, _GROWTH)
            self._counts += [0] * some
            self.keys.grow(some)
            self.cached.grow(some)
            yield

    def dismantle(self) -> Iterator[None]:
        """Give the memory of a tier that nobody uses any more back, with pauses: all at once takes long."""
        self.free.clear()
        while self._counts:
            del self._counts[-_SLICE:]
            yield
        yield from self.keys.clearing(_SLICE)
        yield from self.cached.clearing(_SLICE)

    # Checks.

    def block_faults(self, block: int, holders: int) -> list[BlockFault]:
        """Check a block with this number of holders, but not whether it is free: see `free_faults`."""
        count, key, mark = self._counts[block], self.keys.of[block], self.marks.of[block]
        cached, withheld, unindexed = block in self.cached, mark == WITHHELD, mark & UNINDEXED
        faults = []
        if count != holders:
            faults.append(f"block {block} has count {count} but {holders} holders")
        if (count != 0) + cached + withheld > 1:
            places = f"count {count}, {'' if cached else 'not '}cached, {'' if withheld else 'not '}withheld"
            faults.append(f"block {block} is in several places: {places}")
        if cached and not self.cached.is_linked(block):
            faults.append(f"block {block} is cached out of order")
        if cached and key is None:
            faults.append(f"block {block} is cached without a key")
        if key is not None and not (count or cached):
            faults.append(f"block {block} has a key but is neither held nor cached")
        if unindexed and not count:
            faults.append(f"block {block} counts as held where no key leads to it, but it is not held")
        if mark & WITHHOLD_ON_RELEASE and not unindexed:
            faults.append(f"block {block} is to be withheld, but findable")
        return [BlockFault(block, fault) for fault in faults] + self.keys.block_faults(block)

    def free_faults(self) -> list[BlockFault]:
        """Check the free list, and whether a block is in no place. Takes time by the size of the tier."""
        faults, seen = [], set()
        counts, keys, marks = self._counts, self.keys.of, self.marks.of
        for block in self.free.in_order():
            if block in seen or counts[block] or keys[block] is not None or marks[block]:
                faults.append(BlockFault(block, f"block {block} is among the free ones, where it does not belong"))
            seen.add(block)
        for block in range(1, self.total + 1):
            placed = counts[block] or block in self.cached or marks[block] or block in seen
            if not placed:
                faults.append(BlockFault(block, f"block {block} is neither free nor cached, held or withheld"))
        return faults

    def violations(self, holders: dict[int, int]) -> list[str]:
        """Check the tier against `holders`, the table entries and pins counted by block; a sentence for each fault."""
        faults = [
            fault for block in range(1, self.total + 1) for fault in self.block_faults(block, holders.get(block, 0))
        ]
        faults += self.free_faults()
        sentences = [sentence for _, sentence in faults]
        for part in (self.keys, self.cached, self.marks):
            sentences += part.violations()
        if self.saved != sum(count - 1 for count in self._counts if count):
            sentences.append(f"saved is {self.saved}, counts say otherwise")
        if self.shared != sum(count > 1 for count in self._counts):
            sentences.append(f"shared is {self.shared}, counts say otherwise")
        return sentences
