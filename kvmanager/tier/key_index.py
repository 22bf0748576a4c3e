"""The keys of a tier's blocks, and the index from keys to blocks in sealing order.

A dict that grows copies all its entries at once, which takes tens of milliseconds at a million keys. A large tier
therefore has many dicts, selected by the first byte of the key: keys are digests, which spread evenly.

Several blocks may have the same key, because tables are append-only and never rewritten to a duplicate. The index
returns the block that was sealed first. A marked block is not in the index but keeps its key, because keyed blocks must
not be overwritten.
"""

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

IndexEntry = int | list[int]


class KeyIndex:
    """The key of each block, and the blocks of each key: a plain block id, or a list if several have the key."""

    def __init__(self, total: int, marks: BlockMarks) -> None:
        """Start without keys."""
        shards = 1
        while shards < _BYTES and shards * _SHARD_KEYS < total:
            shards *= 2
        self.by_block: list[bytes | None] = [None]
        self._marks = marks
        self._distinct: list[dict[bytes, IndexEntry]] = [{} for _ in range(shards)]
        self._shards = self._distinct * (_BYTES // shards)  # by the first byte

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

    def find(self, key: bytes) -> int | None:
        """Return the block sealed first under `key`, None if there is none. Takes no reference."""
        block = self._shards[key[0]].get(key)
        if type(block) is list:
            block = block[0]
        if block is not None and self._marks.marked_count and self._marks.by_block[block]:  # type: ignore[index]
            # A damaged index may contain blocks that the audit has marked.
            return next((block for block in self.blocks_of(key) if not self._marks.by_block[block]), None)
        return block  # type: ignore[return-value]

    def blocks_of(self, key: bytes) -> list[int]:
        """Return the blocks that are indexed under a key, in sealing order."""
        return _listed(self._shards[key[0]].get(key, []))

    def seal(self, block: int, key: bytes) -> None:
        """Set the key of a held block. `find` returns the block unless an earlier one has the same key."""
        self.by_block[block] = key
        if not (self._marks.marked_count and self._marks.by_block[block]) and (
            self._shards[key[0]].setdefault(key, block) is not block
        ):
            self._add_duplicate(key, block)

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

    def seal_unindexed(self, block: int, key: bytes) -> None:
        """Set the key of a held block without indexing it. With NO_KEY, its future key is not indexed either."""
        if key != NO_KEY:
            self.by_block[block] = key
        self._marks.unindex(block)

    def _add_duplicate(self, key: bytes, block: int) -> None:
        shard = self._shards[key[0]]
        entry = shard[key]
        if type(entry) is list:
            if block not in entry:
                entry.append(block)
        elif entry != block:
            shard[key] = [entry, block]  # type: ignore[list-item]

    def unindex(self, block: int) -> None:
        """Remove a block from the index. The block keeps its key, if it has one."""
        key = self.by_block[block]
        if key is not None:
            self._unindex(key, block)

    def _unindex(self, key: bytes, block: int) -> None:
        shard = self._shards[key[0]]
        entry = shard.get(key)
        if entry == block:
            del shard[key]
        elif type(entry) is list and block in entry:
            entry.remove(block)
            if len(entry) == 1:
                shard[key] = entry[0]

    def remove(self, block: int) -> bytes:
        """Remove a keyed block from the index, and return its former key."""
        key = self.by_block[block]
        assert key is not None, "only keyed blocks are removed"
        self.by_block[block] = None
        self._unindex(key, block)
        return key

    def clear(self, block: int) -> None:
        """Remove the key of a block that is not in the index."""
        self.by_block[block] = None

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

    def sealing_order(self) -> dict[int, bytes]:
        """Return the indexed blocks with their keys; blocks with the same key are in sealing order."""
        return {block: key for key, block in self._entries()}

    def _entries(self) -> Iterator[tuple[bytes, int]]:
        for shard in self._distinct:
            for key, entry in shard.items():
                for block in _listed(entry):
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
        indexed = self.blocks_of(key)
        faults = [] if block in indexed else [BlockFault(block, f"block {block} is not in the index under its key")]
        first = indexed[0] if indexed else block
        if self.by_block[first] != key and not self._marks.by_block[first]:
            faults.append(BlockFault(first, f"block {first} is indexed under the key of block {block}, not its own"))
        return faults

    def checking(self) -> Iterator[list[BlockFault]]:
        """Check that no block is indexed under another block's key, yielding the faults after each slice.

        Removes the faulty entries, and those of marked blocks, which `find` skips.
        """
        for shard in self._distinct:
            faults = []
            for key, entry in list(shard.items()):
                for block in list(_listed(entry)):
                    if self._marks.by_block[block]:
                        self._unindex(key, block)
                    elif self.by_block[block] != key:
                        faults.append(BlockFault(block, f"block {block} is indexed under a key that is not its own"))
                        self._unindex(key, block)
            yield faults

    def violations(self) -> list[str]:
        """Return a message for each block that is indexed under a key that is not its own."""
        return [
            f"block {block} is indexed under a key that is not its own"
            for key, block in self._entries()
            if self.by_block[block] != key and not self._marks.by_block[block]
        ]


def _listed(entry: IndexEntry) -> list[int]:
    return entry if isinstance(entry, list) else [entry]
