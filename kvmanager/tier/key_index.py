"""The keys of a tier's blocks, and the index from keys to blocks in sealing order.

A dict that grows copies all its entries at once, which takes tens of milliseconds at a million keys. A large tier
therefore has many dicts, selected by the first byte of the key: keys are digests, which spread evenly.

Several blocks may have the same key, because tables are append-only and never rewritten to a duplicate. The index
returns the block that was sealed first, and a ring of links leads from it to the others: any of them is added or
removed in O(1). A marked block is not in the index but keeps its key, because keyed blocks must not be overwritten.
"""

from array import array
from collections.abc import Iterable, Iterator

from blocks import KEY_BYTES
from kvmanager.tier.fault import BlockFault
from kvmanager.tier.marks import UNINDEXED, BlockMarks

# The key of an unindexed block that has no key yet. No digest is all zeros.
NO_KEY = bytes(KEY_BYTES)
_BYTES = 256
# Approximate maximum of keys in a dict: copying this many takes some 0.2 ms.
_SHARD_KEYS = 8192
# Entries that are processed without a pause: well below a millisecond.
_SLICE = 1000


class KeyIndex:
    """The key of each block, and the blocks of each key: the first one, linked with the others."""

    def __init__(self, total: int, marks: BlockMarks) -> None:
        """Start without keys."""
        shards = 1
        while shards < _BYTES and shards * _SHARD_KEYS < total:
            shards *= 2
        self.by_block: list[bytes | None] = [None]
        # Blocks whose contents an earlier process of the engine computed.
        self.outlived: set[int] = set()
        # Keys that got a block or lost their last one, for whoever follows the index and empties the list; else None.
        self.journal: list[bytes] | None = None
        self._marks = marks
        self._distinct: list[dict[bytes, int]] = [{} for _ in range(shards)]
        self._shards = self._distinct * (_BYTES // shards)  # by the first byte
        # The ring of a key's blocks, in sealing order; the first follows the last. 0: no other block has the key.
        self._next = array("i", (0,))
        self._previous = array("i", (0,))

    def __len__(self) -> int:
        """Number of indexed keys."""
        return sum(map(len, self._distinct))

    def keys_of(self, blocks: Iterable[int]) -> list[bytes | None]:
        """Return the blocks' keys."""
        keys = self.by_block
        return [keys[block] for block in blocks]

    def any_keyed(self, blocks: Iterable[int]) -> bool:
        """Return whether any of the blocks has a key."""
        return any(map(self.by_block.__getitem__, blocks))

    def grow(self, count: int) -> None:
        """Add entries for `count` more blocks."""
        self.by_block += [None] * count
        for links in (self._next, self._previous):
            links.frombytes(bytes(count * links.itemsize))

    def find(self, key: bytes) -> int | None:
        """Return the block sealed first under `key`, None if there is none. Takes no reference."""
        block = self._shards[key[0]].get(key)
        if block is not None and self._marks.marked_count and self._marks.by_block[block]:
            # A damaged index may contain blocks that the audit has marked.
            return next((block for block in self._ring(block) if not self._marks.by_block[block]), None)
        return block

    def blocks_of(self, key: bytes) -> list[int]:
        """Return the blocks that are indexed under a key, in sealing order."""
        first = self._shards[key[0]].get(key)
        return [] if first is None else list(self._ring(first))

    def _ring(self, first: int) -> Iterator[int]:
        """Yield the blocks of a key. The ring must not change during the iteration."""
        block = first
        while block:
            yield block
            block = self._next[block]
            if block == first:
                return

    def seal(self, block: int, key: bytes) -> None:
        """Set the key of a held block. `find` returns the block unless an earlier one has the same key."""
        self.by_block[block] = key
        if not (self._marks.marked_count and self._marks.by_block[block]) and (
            self._shards[key[0]].setdefault(key, block) is not block
        ):
            self._add_duplicate(key, block)
        if self.journal is not None:
            self.journal.append(key)

    def seal_many(self, blocks: list[int], keys: list[bytes]) -> None:
        """Set the keys of held blocks that have none, as `seal` does."""
        if self._marks.marked_count:
            for block, key in zip(blocks, keys, strict=True):
                self.seal(block, key)
            return
        own, shards = self.by_block, self._shards
        for block, key in zip(blocks, keys, strict=True):
            own[block] = key
            if shards[key[0]].setdefault(key, block) is not block:
                self._add_duplicate(key, block)
        if self.journal is not None:
            self.journal += keys

    def seal_unindexed(self, block: int, key: bytes) -> None:
        """Set the key of a held block without indexing it. With NO_KEY, its future key is not indexed either."""
        if key != NO_KEY:
            self.by_block[block] = key
        self._marks.unindex(block)

    def _add_duplicate(self, key: bytes, block: int) -> None:
        """Add a block to the end of the ring of its key, unless the block is in a ring already."""
        following, preceding = self._next, self._previous
        first = self._shards[key[0]][key]
        if first == block or following[block]:
            return
        last = preceding[first] or first
        following[last] = preceding[first] = block
        following[block], preceding[block] = first, last

    def unindex(self, block: int) -> None:
        """Remove a block from the index. The block keeps its key, if it has one."""
        key = self.by_block[block]
        if key is not None:
            self._unindex(key, block)

    def _unindex(self, key: bytes, block: int) -> None:
        if self._shards[key[0]].get(key) == block:
            self._unlink(key, block)
        elif after := self._next[block]:
            # The key of a damaged block is not that of its ring; the next block's is.
            self._unlink(self.by_block[after] or key, block)

    def _unlink(self, key: bytes, block: int) -> None:
        """Remove a block from the ring of a key."""
        following, preceding = self._next, self._previous
        shard, after = self._shards[key[0]], following[block]
        if not after:
            del shard[key]
            if self.journal is not None:
                self.journal.append(key)
            return
        if shard.get(key) == block:
            shard[key] = after
        before = preceding[block]
        following[before], preceding[after] = after, before
        following[block] = preceding[block] = 0
        if before == after == following[after]:  # the only one left
            following[after] = preceding[after] = 0

    def remove(self, block: int) -> bytes:
        """Remove a keyed block from the index, and return its former key."""
        key = self.by_block[block]
        assert key is not None, "only keyed blocks are removed"
        self.clear(block)
        self._unindex(key, block)
        return key

    def clear(self, block: int) -> None:
        """Remove the key of a block that is not in the index."""
        self.by_block[block] = None
        if self.outlived:
            self.outlived.discard(block)

    def unindexing(self) -> Iterator[int]:
        """Empty the index; the blocks keep their keys. Yields the units of work after every slice."""
        for start in range(1, len(self.by_block), _SLICE):
            yield _SLICE
            for block, key in enumerate(self.by_block[start : start + _SLICE], start):
                if key is not None and not self._marks.by_block[block]:
                    self._unindex(key, block)
                    self._marks.set(block, UNINDEXED)

    def clearing(self, entries: int) -> Iterator[None]:
        """Free the memory, pausing after each `entries` entries."""
        for shard in self._distinct:
            while shard:
                for _ in range(min(len(shard), entries)):
                    shard.popitem()
                yield
        while self.by_block:
            del self.by_block[-entries:]
            yield
        while self.outlived:
            for _ in range(min(len(self.outlived), entries)):
                self.outlived.pop()
            yield
        self._next, self._previous = array("i"), array("i")

    def entries(self) -> Iterator[tuple[bytes, int]]:
        """Yield the keys with their indexed blocks; blocks with the same key are in sealing order."""
        for shard in self._distinct:
            for key, first in shard.items():
                for block in self._ring(first):
                    yield key, block

    def is_first_of_key(self, block: int) -> bool:
        """Return whether `find` returns this block for its key."""
        key = self.by_block[block]
        return key is not None and not self._marks.by_block[block] and self.find(key) == block

    def block_faults(self, block: int) -> list[BlockFault]:
        """Check that a block is indexed under its key, unless it is marked, behind no block with another key."""
        key = self.by_block[block]
        if key is None or self._marks.by_block[block] & UNINDEXED:
            return []
        first = self._shards[key[0]].get(key)
        if first is None or not (first == block or self._is_linked(block)):
            return [BlockFault(block, f"block {block} is not in the index under its key")]
        faults = []
        if self.by_block[first] != key and not self._marks.by_block[first]:
            faults.append(BlockFault(first, f"block {first} is indexed under the key of block {block}, not its own"))
        return faults

    def _is_linked(self, block: int) -> bool:
        """Return whether a block is in a ring; `checking` finds those in the ring of another key."""
        before = self._previous[block]
        return bool(before) and self._next[before] == block

    def checking(self) -> Iterator[list[BlockFault]]:
        """Check that no block is indexed under another block's key, yielding the faults after each slice.

        Removes the faulty entries, and those of marked blocks, which `find` skips.
        """
        for shard in self._distinct:
            faults = []
            for key, first in list(shard.items()):
                for block in list(self._ring(first)):
                    if self._marks.by_block[block]:
                        self._unlink(key, block)
                    elif self.by_block[block] != key:
                        faults.append(BlockFault(block, f"block {block} is indexed under a key that is not its own"))
                        self._unlink(key, block)
            yield faults

    def violations(self) -> list[str]:
        """Return a message for each block that is indexed under another key, or is marked as outlived without one."""
        wrong = [
            f"block {block} is indexed under a key that is not its own"
            for key, block in self.entries()
            if self.by_block[block] != key and not self._marks.by_block[block]
        ]
        without = [block for block in sorted(self.outlived) if self.by_block[block] is None]
        return wrong + [f"block {block} is marked as outlived, but has no key" for block in without]
