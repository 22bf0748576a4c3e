"""The blocks of one tier (device or host memory): who is free, who is cached, who is held, and under which key.

Every id from 1 to `total` is in exactly one place:

    free      count 0, no key       in `_free`, handed out first, in order of release
    cached    count 0, with a key   in a linked list, handed out next, least recently released first
    held      count above 0         in `_counts` alone
    withheld  taken out for good    marked so; a held block that waits for that is marked as condemned

So the two queues together are the eviction order. A block keeps its key (and the memory its contents) until it is
handed out again. Several blocks may carry one key, because tables are append-only and are never rewritten to a twin;
the index answers with the one sealed first.

The verbs of a pool run through here thousands of times a second: the methods that take many blocks at once are the
fast ones. Nothing here grows by copying all it has, which at a million blocks would hold everybody up.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from kvmanager.errors import OutOfBlocks
from kvmanager.key_index import KeyIndex, listed
from kvmanager.keys import KEY_BYTES

# Stands for the key of an unfindable block that has none yet. No digest is all zeros.
NO_KEY = bytes(KEY_BYTES)
# Blocks that were handed out and are still in the array of free ones, at most, while there are more of the others.
_LONGEST_GONE = 4000
# Entries that are looked at or given back without a pause: well below a millisecond.
_SLICE = 1000
# Blocks that a tier grows by in one go.
_GROWTH = 20_000
# Free blocks that are searched in one go.
_SEARCHED = 65_536

# What is unusual about a block.
_UNFINDABLE = 1  # held, and no key leads to it, though it has one or will have: keyed before a reset, blamed, or a copy
_CONDEMNED = 2  # held, unfindable, and withheld once nobody holds it
WITHHELD = 4


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


class Fault(NamedTuple):
    """What is wrong in the books of a tier. `block` is 0 where it is no single one."""

    block: int
    sentence: str


class Tier:
    """Counts, keys and eviction order of the blocks of one tier.

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
        self.evictions: list[Eviction] = []  # since the list was last taken
        self._counts = [0]
        self._keys: list[bytes | None] = [None]
        self._index = KeyIndex(total)
        # Numbers in an array, not objects in a deque: after a long life those lie scattered over the memory, and each
        # grant would wait for it. What is before the head has been handed out.
        self._free = array("i")
        self._head = 0
        # The cached blocks as a ring through entry 0. A block is in it if the one before it is followed by it: what is
        # left behind in the entries of one that is not never says so.
        self._following = [0]
        self._preceding = [0]
        self._cached_count = 0
        self._marks = bytearray(total + 1)
        self._marked = 0  # blocks with a mark
        self._withheld_count = 0
        if not incomplete:
            for _ in self.growing():
                pass
            self._free.extend(range(1, total + 1))

    @property
    def counts(self) -> BlockCounts:
        """Blocks by state."""
        free, cached, withheld = self.empty_blocks, self._cached_count, self._withheld_count
        return BlockCounts(free, cached, self.total - free - cached - withheld, withheld)

    @property
    def available(self) -> int:
        """Blocks that `grant` can hand out now."""
        return len(self._free) - self._head + self._cached_count

    @property
    def empty_blocks(self) -> int:
        """Blocks that `grant` can hand out without evicting any."""
        return len(self._free) - self._head

    def count(self, block: int) -> int:
        """Return how many table entries and pins hold the block."""
        return self._counts[block]

    def key(self, block: int) -> bytes | None:
        """Return the block's key, None while it has none."""
        return self._keys[block]

    def keys_of(self, blocks: Iterable[int]) -> list[bytes | None]:
        """Return the blocks' keys."""
        keys = self._keys
        return [keys[block] for block in blocks]

    def find(self, key: bytes) -> int | None:
        """Return the block sealed first under `key`, None if there is none. Reserves nothing."""
        block = self._index.shards[key[0]].get(key)
        if type(block) is list:
            block = block[0]
        if block is not None and self._marked and self._marks[block]:  # type: ignore[index]
            return self._find_unmarked(key)
        return block  # type: ignore[return-value]

    def _find_unmarked(self, key: bytes) -> int | None:
        """Pass over what a damaged index says of blocks that were blamed."""
        return next((block for block in self._index.carriers(key) if not self._marks[block]), None)

    def eviction_order(self) -> list[int]:
        """Return the blocks at count 0 in the order in which they will be handed out."""
        return [*self._free[self._head :], *self._ring()]

    def _ring(self) -> Iterator[int]:
        """Yield the cached blocks in their order. They must not change meanwhile."""
        block = self._following[0]
        while block:
            yield block
            block = self._following[block]

    def _is_cached(self, block: int) -> bool:
        return self._following[self._preceding[block]] == block

    def _join_ring(self, block: int) -> None:
        last = self._preceding[0]
        self._following[last] = self._preceding[0] = block
        self._preceding[block], self._following[block] = last, 0
        self._cached_count += 1

    def _leave_ring(self, block: int) -> None:
        """Take a block out of the cached ones. Raises KeyError where it is not among them."""
        following, preceding = self._following, self._preceding
        before, after = preceding[block], following[block]
        if following[before] != block or not block:
            raise KeyError(block)
        following[before], preceding[after] = after, before
        self._cached_count -= 1

    def take_evictions(self) -> list[Eviction]:
        """Return the blocks that were evicted since the last call."""
        evictions, self.evictions = self.evictions, []
        return evictions

    def grant(self) -> int:
        """Hand out the next block at count 1, forgetting its key. Raises OutOfBlocks when none is left."""
        if self._head < len(self._free):
            block = self._free[self._head]
            self._head += 1
        elif block := self._following[0]:
            self._leave_ring(block)
            self.evictions.append(Eviction(block, self._forget_key(block)))
        else:
            raise OutOfBlocks(f"none of {self.total} blocks is free")
        self._counts[block] = 1
        return block

    def grant_many(self, number: int) -> list[int]:
        """Hand out the next blocks; there must be so many."""
        if number > self.empty_blocks:
            return [self.grant() for _ in range(number)]
        blocks = self._free[self._head : self._head + number].tolist()
        self._head += number
        counts = self._counts
        for block in blocks:
            counts[block] = 1
        return blocks

    def hold(self, block: int) -> None:
        """Add a holder; a cached block leaves the eviction order, which is how a hit refreshes it."""
        count = self._counts[block]
        if count:
            self.saved += 1
            self.shared += count == 1
        else:
            self._leave_ring(block)
        self._counts[block] = count + 1

    def touch(self, block: int) -> None:
        """Refresh a block without holding it: if it is cached, it is evicted last of all."""
        if not self._counts[block]:
            self._leave_ring(block)
            self._join_ring(block)

    def release(self, block: int) -> None:
        """Take a holder away; at count 0 the block joins the end of its queue."""
        self.release_many((block,))

    def release_many(self, blocks: Iterable[int]) -> None:
        """Take a holder of each block away, in this order."""
        if self._marked:
            for block in blocks:
                self._release_one(block)
            return
        counts, keys, free = self._counts, self._keys, self._free
        following, preceding = self._following, self._preceding
        last, cached = preceding[0], 0
        for block in blocks:
            count = counts[block]
            if count == 1:
                counts[block] = 0
                if keys[block] is None:
                    free.append(block)
                else:
                    following[last] = block
                    preceding[block] = last
                    last = block
                    cached += 1
            else:
                counts[block] = count - 1
                self.saved -= 1
                self.shared -= count == 2
        following[last] = 0
        preceding[0] = last
        self._cached_count += cached
        if self._head > _LONGEST_GONE and 2 * self._head > len(free):
            self._forget_gone()

    def _release_one(self, block: int) -> None:
        """Release a block as `release_many` does, where some are marked."""
        count = self._counts[block]
        self._counts[block] = count - 1
        if count != 1:
            self.saved -= 1
            self.shared -= count == 2
        elif self._marks[block]:
            self._release_marked(block)
        elif self._keys[block] is None:
            self._free.append(block)
        else:
            self._join_ring(block)

    def _release_marked(self, block: int) -> None:
        """Take a block that no key leads to out of circulation, or put it among the free ones."""
        self._keys[block] = None
        if self._marks[block] & _CONDEMNED:
            self._marks[block] = WITHHELD
            self._withheld_count += 1
        else:
            self._unmark(block)
            self._free.append(block)

    def _unmark(self, block: int) -> None:
        if self._marks[block]:
            self._withheld_count -= self._marks[block] == WITHHELD
            self._marked -= 1
            self._marks[block] = 0

    def _mark(self, block: int, mark: int) -> None:
        self._marked += not self._marks[block]
        self._withheld_count += (mark == WITHHELD) - (self._marks[block] == WITHHELD)
        self._marks[block] = mark

    def _forget_gone(self) -> None:
        del self._free[: self._head]
        self._head = 0

    def seal(self, block: int, key: bytes) -> None:
        """Give a held block its key. It becomes the index's answer unless an earlier block carries the same key.

        No key ever leads to an unfindable block: it keeps its key to itself.
        """
        self._keys[block] = key
        if self._marked and self._marks[block]:
            return
        if self._index.shards[key[0]].setdefault(key, block) is not block:
            self._index.add(key, block)

    def seal_many(self, blocks: list[int], keys: list[bytes]) -> None:
        """Give held blocks without a key theirs, as `seal` does."""
        if self._marked:
            for block, key in zip(blocks, keys, strict=True):
                self.seal(block, key)
            return
        own, shards = self._keys, self._index.shards
        for block, key in zip(blocks, keys, strict=True):
            own[block] = key
            if shards[key[0]].setdefault(key, block) is not block:
                self._index.add(key, block)

    def park(self, key: bytes) -> int:
        """Turn the free block that would be handed out next into a cached one under `key`; there must be one."""
        block = self._free[self._head]
        self._head += 1
        self.seal(block, key)
        self._join_ring(block)
        return block

    def forgetting_keys(self) -> Iterator[int]:
        """Empty the index: cached blocks become free, in their order; held ones keep their keys, but nobody finds them.

        A key says what may not be overwritten, so a held block has it until its last holder leaves. Pauses after every
        slice with its units of work; nothing else may happen to the tier before the end.
        """
        for start in range(0, self._cached_count, _SLICE):
            if start:
                yield 2 * _SLICE
            for _ in range(min(_SLICE, self._cached_count)):
                block = self._following[0]
                self._leave_ring(block)
                self._forget_key(block)
                self._free.append(block)
        for start in range(1, self.total + 1, _SLICE):
            yield _SLICE
            for block, key in enumerate(self._keys[start : start + _SLICE], start):
                if key is not None and not self._marks[block]:
                    self._index.discard(key, block)
                    self._mark(block, _UNFINDABLE)

    # Writing and adopting reports.

    def sealing_order(self) -> dict[int, bytes]:
        """Return the blocks in the index with their keys; those of one key stand in the order of their sealing."""
        return {block: key for key, carriers in self._index.items() for block in listed(carriers)}

    def unfindable(self) -> dict[int, bytes]:
        """Return the held blocks that no key leads to, with their keys; NO_KEY for those that have none yet."""
        return {block: self._keys[block] or NO_KEY for block in self._marked_with(_UNFINDABLE)}

    def withheld(self) -> list[int]:
        """Return the blocks that were taken out of circulation."""
        return self._marked_with(WITHHELD)

    def condemned(self) -> list[int]:
        """Return the held blocks that will be taken out of circulation once nobody holds them."""
        return self._marked_with(_CONDEMNED)

    def _marked_with(self, mark: int) -> list[int]:
        return [block for block, marks in enumerate(self._marks) if marks & mark] if self._marked else []

    def dismantle(self) -> Iterator[None]:
        """Give the memory of a tier that nobody uses any more back, with pauses: all at once takes long."""
        for shard in self._index.distinct:
            while shard:
                for _ in range(min(len(shard), _SLICE)):
                    shard.popitem()
                yield
        self._free = array("i")
        self._head = self._cached_count = 0
        for entries in (self._keys, self._counts, self._following, self._preceding):
            while entries:
                del entries[-_SLICE:]
                yield

    def growing(self) -> Iterator[None]:
        """Make room for what is to be said of each block, with pauses: fresh memory takes its time."""
        while (missing := self.total + 1 - len(self._counts)) > 0:
            some = min(missing, _GROWTH)
            self._keys += [None] * some
            for numbers in (self._counts, self._following, self._preceding):
                numbers += [0] * some
            yield

    def count_holders(self, blocks: Iterable[int]) -> None:
        """Add a holder of each block, whoever it is and wherever it was."""
        for block in blocks:
            count = self._counts[block]
            self._counts[block] = count + 1
            self.saved += count > 0
            self.shared += count == 1

    def seal_unfindable(self, block: int, key: bytes) -> None:
        """Give a held block a key that does not lead to it. NO_KEY: it has none yet; the one that it gets will not."""
        if key != NO_KEY:
            self._keys[block] = key
        self.make_unfindable(block)

    def put_back(self, blocks: Iterable[int]) -> None:
        """Put blocks at count 0 at the ends of their queues."""
        for block in blocks:
            if self._keys[block] is None:
                self._free.append(block)
            else:
                self._join_ring(block)

    def put_aside(self, blocks: Iterable[int]) -> None:
        """Withhold blocks that are in no queue: in no place yet, or held."""
        for block in blocks:
            self._take_out(block, self._counts[block])

    # Withholding. It is rare: a block is looked for among all free ones.

    def withhold(self, holders: Mapping[int, int]) -> None:
        """Take blocks out of circulation: now, or once the so many holders of each have left. Nobody finds them again.

        It does not matter what the books say of these blocks, or where they are: it is set right.
        """
        for block, count in holders.items():
            self._leave_free(block)
            if self._is_cached(block):
                self._leave_ring(block)
            self._take_out(block, count)

    def _take_out(self, block: int, count: int) -> None:
        key = self._keys[block]
        if key is not None:
            self._index.discard(key, block)
        self._counts[block] = count
        if count:
            self._mark(block, _UNFINDABLE | _CONDEMNED)
        else:
            self._keys[block] = None
            self._mark(block, WITHHELD)

    def _leave_free(self, block: int) -> None:
        """Take a block out of the free ones, however often it is among them."""
        free, wanted = self._free, array("i", (block,)).tobytes()
        width, start = free.itemsize, self._head
        while start < len(free):
            part = free[start : start + _SEARCHED].tobytes()
            at = part.find(wanted)
            while at % width and at >= 0:
                at = part.find(wanted, at + 1)
            if at >= 0:
                start += at // width
                del free[start]
            else:
                start += _SEARCHED

    def is_findable(self, block: int) -> bool:
        """Return whether a key may lead to the block; what has been copied from one that is not is not either."""
        return not self._marks[block]

    def make_unfindable(self, block: int) -> None:
        """Let no key lead to a held block that is not in the index, now or later."""
        if not self._marks[block]:
            self._mark(block, _UNFINDABLE)

    def is_out(self, block: int) -> bool:
        """Return whether the block is withheld, or will be."""
        return self._marks[block] > _UNFINDABLE

    def _forget_key(self, block: int) -> bytes:
        key = self._keys[block]
        assert key is not None, "only keyed blocks are forgotten"
        self._keys[block] = None
        self._index.discard(key, block)
        return key

    # For the audit, which looks at some blocks at a time.

    @property
    def index_size(self) -> int:
        """How many keys can be found."""
        return len(self._index)

    def answers(self, block: int) -> bool:
        """Return whether the block is the one that is found under its key."""
        key = self._keys[block]
        return key is not None and not self._marks[block] and self.find(key) == block

    def block_faults(self, block: int, holders: int) -> list[Fault]:
        """Check a block that so many table entries and pins hold, but not whether it is free: see `free_faults`."""
        count, key, mark = self._counts[block], self._keys[block], self._marks[block]
        cached, withheld, unfindable = self._is_cached(block), mark == WITHHELD, mark & _UNFINDABLE
        faults = []
        if count != holders:
            faults.append(Fault(block, f"block {block} has count {count} but {holders} holders"))
        if (count != 0) + cached + withheld > 1:
            places = f"count {count}, {'' if cached else 'not '}cached, {'' if withheld else 'not '}withheld"
            faults.append(Fault(block, f"block {block} is in several places: {places}"))
        if cached and self._preceding[self._following[block]] != block:
            faults.append(Fault(block, f"block {block} is cached out of order"))
        if cached and key is None:
            faults.append(Fault(block, f"block {block} is cached without a key"))
        if key is not None and not (count or cached):
            faults.append(Fault(block, f"block {block} has a key but is neither held nor cached"))
        if unfindable and not count:
            faults.append(Fault(block, f"block {block} counts as held where no key leads to it, but it is not held"))
        if mark & _CONDEMNED and not unfindable:
            faults.append(Fault(block, f"block {block} is to be withheld, but findable"))
        if key is not None and not unfindable:
            faults += self._key_faults(block, key)
        return faults

    def _key_faults(self, block: int, key: bytes) -> list[Fault]:
        carriers = self._index.carriers(key)
        faults = [] if block in carriers else [Fault(block, f"block {block} is not in the index under its key")]
        first = carriers[0] if carriers else block
        if self._keys[first] != key and not self._marks[first]:
            faults.append(Fault(first, f"block {first} is found under the key of block {block}, which it has not"))
        return faults

    def free_faults(self) -> list[Fault]:
        """Check the queue of free blocks, and whether a block is in no place. Takes time by the size of the tier."""
        faults, seen = [], set()
        for block in self._free[self._head :]:
            count, key = self._counts[block], self._keys[block]
            if block in seen or count or key is not None or self._marks[block]:
                faults.append(Fault(block, f"block {block} is among the free ones, where it does not belong"))
            seen.add(block)
        for block in range(1, self.total + 1):
            placed = self._counts[block] or self._is_cached(block) or self._marks[block] or block in seen
            if not placed:
                faults.append(Fault(block, f"block {block} is neither free nor cached, held or withheld"))
        return faults

    def checking_index(self) -> Iterator[list[Fault]]:
        """Check that no key leads to a block that has another one, pausing after each slice with what was found.

        Keys that lead to blocks that were blamed are dropped: `find` passes over them, but they are no good.
        """
        for shard in self._index.distinct:
            faults = []
            for key, carriers in list(shard.items()):
                for block in list(listed(carriers)):
                    if self._marks[block]:
                        self._index.discard(key, block)
                    elif self._keys[block] != key:
                        faults.append(Fault(block, f"block {block} is found under a key that it has not"))
                        self._index.discard(key, block)
            yield faults

    def violations(self, holders: dict[int, int]) -> list[str]:
        """Check the tier against `holders`, the table entries and pins counted by block; a sentence for each fault."""
        faults = [
            fault for block in range(1, self.total + 1) for fault in self.block_faults(block, holders.get(block, 0))
        ]
        faults += self.free_faults()
        sentences = [sentence for _, sentence in faults]
        for key, carriers in self._index.items():
            for block in listed(carriers):
                if self._keys[block] != key and not self._marks[block]:
                    sentences.append(f"block {block} is found under a key that it has not")
        if self._cached_count != len(list(islice(self._ring(), self.total))):
            sentences.append(f"{self._cached_count} blocks are cached, counting says otherwise")
        if self._marked != sum(map(bool, self._marks)) or self._withheld_count != len(self.withheld()):
            sentences.append("the numbers of unfindable and withheld blocks are wrong")
        if self.saved != sum(count - 1 for count in self._counts if count):
            sentences.append(f"saved is {self.saved}, counts say otherwise")
        if self.shared != sum(count > 1 for count in self._counts):
            sentences.append(f"shared is {self.shared}, counts say otherwise")
        return sentences
