"""The blocks of one tier (device or host memory): who is free, who is cached, who is held, and under which key.

Every id from 1 to `total` is in exactly one place:

    free      count 0, no key       in `_free`, handed out first, in order of release
    cached    count 0, with a key   in `_cached`, handed out next, least recently released first
    held      count above 0         in `_counts` alone
    withheld  taken out for good    in `_withheld`; a held block waits for that in `_condemned`

So the two queues together are the eviction order. A block keeps its key (and the memory its contents) until it is
handed out again. Several blocks may carry one key, because tables are append-only and are never rewritten to a twin;
the index answers with the one sealed first.

The verbs of a pool run through here thousands of times a second: the methods that take many blocks at once are the
fast ones.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import NamedTuple

from kvmanager.errors import OutOfBlocks
from kvmanager.keys import KEY_BYTES

# Stands for the key of an unfindable block that has none yet. No digest is all zeros.
NO_KEY = bytes(KEY_BYTES)
# Blocks that were handed out and are still in the array of free ones, at most, while there are more of the others.
_LONGEST_GONE = 4000
# Entries that are given back without a pause: well below a millisecond.
_SLICE = 4000


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

        An `incomplete` tier begins without any block: whoever adopts a report puts each into its place.
        """
        self.total = total
        self.shared = 0  # blocks with count above 1
        self.saved = 0  # holders beyond the first, summed over blocks
        self.evictions: list[Eviction] = []  # since the list was last taken
        self._counts = [0] * (total + 1)
        self._keys: list[bytes | None] = [None] * (total + 1)
        # A key's carriers in sealing order; nearly every key has one, which then stands for itself.
        self._index: dict[bytes, int | list[int]] = {}
        # Numbers in an array, not objects in a deque: after a long life those lie scattered over the memory, and each
        # grant would wait for it. What is before the head has been handed out.
        self._free = array("i")
        self._head = 0
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._withheld: set[int] = set()
        self._condemned: set[int] = set()  # held blocks that are withheld once nobody holds them
        # Held blocks that no key leads to: keyed before a reset, or blamed by an audit, or copies of such blocks. They
        # need not have their keys yet.
        self._unfindable: set[int] = set()
        if not incomplete:
            self._free.extend(range(1, total + 1))

    @property
    def counts(self) -> BlockCounts:
        """Blocks by state."""
        free, cached, withheld = self.empty_blocks, len(self._cached), len(self._withheld)
        return BlockCounts(free, cached, self.total - free - cached - withheld, withheld)

    @property
    def available(self) -> int:
        """Blocks that `grant` can hand out now."""
        return len(self._free) - self._head + len(self._cached)

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
        carriers = self._index.get(key)
        return carriers[0] if type(carriers) is list else carriers  # type: ignore[return-value]

    def eviction_order(self) -> list[int]:
        """Return the blocks at count 0 in the order in which they will be handed out."""
        return [*self._free[self._head :], *self._cached]

    def take_evictions(self) -> list[Eviction]:
        """Return the blocks that were evicted since the last call."""
        evictions, self.evictions = self.evictions, []
        return evictions

    def grant(self) -> int:
        """Hand out the next block at count 1, forgetting its key. Raises OutOfBlocks when none is left."""
        if self._head < len(self._free):
            block = self._free[self._head]
            self._head += 1
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
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
            del self._cached[block]
        self._counts[block] = count + 1

    def touch(self, block: int) -> None:
        """Refresh a block without holding it: if it is cached, it is evicted last of all."""
        if not self._counts[block]:
            self._cached.move_to_end(block)

    def release(self, block: int) -> None:
        """Take a holder away; at count 0 the block joins the end of its queue."""
        self.release_many((block,))

    def release_many(self, blocks: Iterable[int]) -> None:
        """Take a holder of each block away, in this order."""
        counts, keys = self._counts, self._keys
        free, cached, unfindable = self._free, self._cached, self._unfindable
        for block in blocks:
            count = counts[block]
            if count == 1:
                counts[block] = 0
                if unfindable and block in unfindable:
                    unfindable.remove(block)
                    keys[block] = None
                    free.append(block)
                elif keys[block] is None:
                    free.append(block)
                else:
                    cached[block] = None
            else:
                counts[block] = count - 1
                self.saved -= 1
                self.shared -= count == 2
        if self._head > _LONGEST_GONE and 2 * self._head > len(free):
            self._forget_gone()
        if self._condemned:
            self._withhold_released()

    def _forget_gone(self) -> None:
        del self._free[: self._head]
        self._head = 0

    def seal(self, block: int, key: bytes) -> None:
        """Give a held block its key. It becomes the index's answer unless an earlier block carries the same key.

        No key ever leads to an unfindable block: it keeps its key to itself.
        """
        self._keys[block] = key
        if self._unfindable and block in self._unfindable:
            return
        carriers = self._index.setdefault(key, block)
        if carriers is block:
            return
        if type(carriers) is list:
            carriers.append(block)
        elif carriers != block:
            self._index[key] = [carriers, block]  # type: ignore[list-item]

    def seal_many(self, blocks: list[int], keys: list[bytes]) -> None:
        """Give held blocks without a key theirs, as `seal` does."""
        own, index, unfindable = self._keys, self._index, self._unfindable
        for block, key in zip(blocks, keys, strict=True):
            if unfindable and block in unfindable:
                own[block] = key
                continue
            own[block] = key
            if index.setdefault(key, block) is not block:
                self.seal(block, key)

    def park(self, key: bytes) -> int:
        """Turn the free block that would be handed out next into a cached one under `key`; there must be one."""
        block = self._free[self._head]
        self._head += 1
        self.seal(block, key)
        self._cached[block] = None
        return block

    def forget_keys(self) -> None:
        """Empty the index: cached blocks become free, in their order; held ones keep their keys, but nobody finds them.

        A key says what may not be overwritten, so a held block has it until its last holder leaves.
        """
        self._index.clear()
        for block in self._cached:
            self._keys[block] = None
        self._free.extend(self._cached)
        self._cached.clear()
        self._unfindable |= {block for block, key in enumerate(self._keys) if key is not None}

    # Writing and adopting reports.

    def sealing_order(self) -> dict[int, bytes]:
        """Return the blocks in the index with their keys; those of one key stand in the order of their sealing."""
        return {block: key for key, carriers in self._index.items() for block in _listed(carriers)}

    def unfindable(self) -> dict[int, bytes]:
        """Return the held blocks that no key leads to, with their keys; NO_KEY for those that have none yet."""
        return {block: self._keys[block] or NO_KEY for block in sorted(self._unfindable)}

    def dismantle(self) -> Iterator[None]:
        """Give the memory of a tier that nobody uses any more back, with pauses: all at once takes long."""
        for entries in (self._index, self._cached):
            while entries:
                for _ in range(min(len(entries), _SLICE)):
                    entries.popitem()
                yield
        self._free = array("i")
        self._head = 0
        for blocks in (self._keys, self._counts):
            while blocks:
                for _ in range(min(len(blocks), _SLICE)):
                    blocks.pop()
                yield

    def withheld(self) -> list[int]:
        """Return the blocks that were taken out of circulation."""
        return sorted(self._withheld)

    def condemned(self) -> list[int]:
        """Return the held blocks that will be taken out of circulation once nobody holds them."""
        return sorted(self._condemned)

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
        self._unfindable.add(block)

    def put_back(self, blocks: Iterable[int]) -> None:
        """Put blocks at count 0 at the ends of their queues."""
        for block in blocks:
            if self._keys[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    def put_aside(self, blocks: Iterable[int]) -> None:
        """Withhold blocks that are in no place yet, or that are held."""
        self.withhold({block: self._counts[block] for block in blocks})

    # Withholding. All of it is rare, and takes time by the size of the tier.

    def withhold(self, holders: Mapping[int, int]) -> None:
        """Take blocks out of circulation: now, or once the so many holders of each have left. Nobody finds them again.

        It does not matter what the books say of these blocks, or where they are: it is set right.
        """
        if not holders:
            return
        self._forget_gone()
        self._free = array("i", [block for block in self._free if block not in holders])
        self._hide(holders.keys())
        for block, count in holders.items():
            self._cached.pop(block, None)
            self._counts[block] = count
            if not count:
                self._keys[block] = None
            places = ((self._condemned, count), (self._withheld, not count), (self._unfindable, count))
            for place, belongs in places:
                place.add(block) if belongs else place.discard(block)

    def _withhold_released(self) -> None:
        self.withhold({block: 0 for block in self._condemned if not self._counts[block]})

    def _hide(self, blocks: Set[int]) -> None:
        """Let no key lead to these blocks, though they keep theirs."""
        if not blocks:
            return
        for key, carriers in list(self._index.items()):
            left = [block for block in _listed(carriers) if block not in blocks]
            if not left:
                del self._index[key]
            elif len(left) < len(_listed(carriers)):
                self._index[key] = left if len(left) > 1 else left[0]

    def is_findable(self, block: int) -> bool:
        """Return whether a key may lead to the block; what has been copied from one that is not is not either."""
        return block not in self._unfindable

    def make_unfindable(self, block: int) -> None:
        """Let no key lead to a held block that is not in the index, now or later."""
        self._unfindable.add(block)

    def is_out(self, block: int) -> bool:
        """Return whether the block is withheld, or will be."""
        return block in self._withheld or block in self._condemned

    def _forget_key(self, block: int) -> bytes:
        key = self._keys[block]
        assert key is not None, "only keyed blocks are forgotten"
        self._keys[block] = None
        carriers = self._index[key]
        if type(carriers) is list:
            carriers.remove(block)
            if len(carriers) == 1:
                self._index[key] = carriers[0]
        else:
            del self._index[key]
        return key

    # For the audit, which looks at some blocks at a time.

    @property
    def index_size(self) -> int:
        """How many keys can be found."""
        return len(self._index)

    def answers(self, block: int) -> bool:
        """Return whether the block is the one that is found under its key."""
        key = self._keys[block]
        return key is not None and block not in self._unfindable and self.find(key) == block

    def block_faults(self, block: int, holders: int) -> list[Fault]:
        """Check a block that so many table entries and pins hold, but not whether it is free: see `free_faults`."""
        count, key = self._counts[block], self._keys[block]
        cached, withheld, unfindable = block in self._cached, block in self._withheld, block in self._unfindable
        faults = []
        if count != holders:
            faults.append(Fault(block, f"block {block} has count {count} but {holders} holders"))
        if (count != 0) + cached + withheld > 1:
            places = f"count {count}, {'' if cached else 'not '}cached, {'' if withheld else 'not '}withheld"
            faults.append(Fault(block, f"block {block} is in several places: {places}"))
        if cached and key is None:
            faults.append(Fault(block, f"block {block} is cached without a key"))
        if key is not None and not (count or cached):
            faults.append(Fault(block, f"block {block} has a key but is neither held nor cached"))
        if unfindable and not count:
            faults.append(Fault(block, f"block {block} counts as held where no key leads to it, but it is not held"))
        if key is not None and not unfindable:
            faults += self._key_faults(block, key)
        return faults

    def _key_faults(self, block: int, key: bytes) -> list[Fault]:
        carriers = _listed(self._index.get(key, []))
        faults = [] if block in carriers else [Fault(block, f"block {block} is not in the index under its key")]
        first = carriers[0] if carriers else block
        if self._keys[first] != key:
            faults.append(Fault(first, f"block {first} is found under the key of block {block}, which it has not"))
        return faults

    def free_faults(self) -> list[Fault]:
        """Check the queue of free blocks, and whether a block is in no place. Takes time by the size of the tier."""
        faults, seen = [], set()
        for block in self._free[self._head :]:
            count, key = self._counts[block], self._keys[block]
            if block in seen or count or key is not None or block in self._withheld:
                faults.append(Fault(block, f"block {block} is among the free ones, where it does not belong"))
            seen.add(block)
        for block in range(1, self.total + 1):
            placed = self._counts[block] or block in self._cached or block in self._withheld or block in seen
            if not placed:
                faults.append(Fault(block, f"block {block} is neither free nor cached, held or withheld"))
        return faults

    def index_faults(self) -> list[Fault]:
        """Check that no key leads to a block that has another one. Takes time by the size of the tier."""
        return [
            Fault(block, f"block {block} is found under a key that it has not")
            for key, carriers in self._index.items()
            for block in _listed(carriers)
            if self._keys[block] != key or block in self._unfindable
        ]

    def violations(self, holders: dict[int, int]) -> list[str]:
        """Check the tier against `holders`, the table entries and pins counted by block; a sentence for each fault."""
        faults = [
            fault for block in range(1, self.total + 1) for fault in self.block_faults(block, holders.get(block, 0))
        ]
        faults += [*self.free_faults(), *self.index_faults()]
        faults += [
            Fault(block, f"block {block} is to be withheld, but findable")
            for block in self._condemned - self._unfindable
        ]
        sentences = [sentence for _, sentence in faults]
        if self.saved != sum(count - 1 for count in self._counts if count):
            sentences.append(f"saved is {self.saved}, counts say otherwise")
        if self.shared != sum(count > 1 for count in self._counts):
            sentences.append(f"shared is {self.shared}, counts say otherwise")
        return sentences


def _listed(carriers: int | list[int]) -> list[int]:
    return carriers if isinstance(carriers, list) else [carriers]
