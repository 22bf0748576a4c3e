"""The keys of a tier's blocks, and which blocks carry a key, in sealing order.

A dict that grows copies all it has at once, which takes tens of milliseconds at a million keys. So a large tier has
many, among which the first bytes of the keys decide: keys are digests, which spread evenly.

Several blocks may carry one key, because tables are append-only and are never rewritten to a twin; the index answers
with the one sealed first. A marked block is in no index, but keeps its key: a key says what may not be overwritten.
"""

from collections.abc import Iterable, Iterator

from blocks import KEY_BYTES
from kvmanager.tier.fault import BlockFault
from kvmanager.tier.marks import UNINDEXED, BlockMarks

# Stands for the key of an unindexed block that has none yet. No digest is all zeros.
NO_KEY = bytes(KEY_BYTES)
_BYTES = 256
# Keys that a dict has at most, more or less: to copy so many takes some 0.2 ms.
_SHARD_KEYS = 8192
# Entries that are looked at or given back without a pause: well below a millisecond.
_SLICE = 1000

Carriers = int | list[int]


class KeyIndex:
    """The key of each block, and the carriers of each key; nearly every key has one, which then stands for itself."""

    def __init__(self, total: int, marks: BlockMarks) -> None:
        """Start without keys."""
        number = 1
        while number < _BYTES and number * _SHARD_KEYS < total:
            number *= 2
        self.of: list[bytes | None] = [None]  # by block
        self._marks = marks
        self._distinct: list[dict[bytes, Carriers]] = [{} for _ in range(number)]
        self._shards = self._distinct * (_BYTES // number)  # by the first byte

    def __len__(self) -> int:
        """How many keys can be found."""
        return sum(map(len, self._distinct))

    def of_many(self, blocks: Iterable[int]) -> list[bytes | None]:
        """Return the blocks' keys."""
        keys = self.of
        return [keys[block] for block in blocks]

    def any_keyed(self, blocks: Iterable[int]) -> bool:
        """Return whether any of the blocks has a key."""
        return any(map(self.of.__getitem__, blocks))

    def grow(self, number: int) -> None:
        """Make room for so many more blocks."""
        self.of += [None] * number

    def find(self, key: bytes) -> int | None:
        """Return the block sealed first under `key`, None if there is none. Reserves nothing."""
        block = self._shards[key[0]].get(key)
        if type(block) is list:
            block = block[0]
        if block is not None and self._marks.number and self._marks.of[block]:  # type: ignore[index]
            # A damaged index may lead to blocks that were blamed.
            return next((block for block in self.carriers(key) if not self._marks.of[block]), None)
        return block  # type: ignore[return-value]

    def carriers(self, key: bytes) -> list[int]:
        """Return the blocks that a key leads to, in sealing order."""
        return _listed(self._shards[key[0]].get(key, []))

    def seal(self, block: int, key: bytes) -> None:
        """Give a held block its key. It becomes the index's answer unless an earlier block carries the same key."""
        self.of[block] = key
        if not (self._marks.number and self._marks.of[block]) and (
            self._shards[key[0]].setdefault(key, block) is not block
        ):
            self._add(key, block)

    def seal_many(self, blocks: list[int], keys: list[bytes]) -> None:
        """Give held blocks without a key theirs, as `seal` does."""
        if self._marks.number:
            for block, key in zip(blocks, keys, strict=True):
                self.seal(block, key)
            return
        own, shards = self.of, self._shards
        for block, key in zip(blocks, keys, strict=True):
            own[block] = key
            if shards[key[0]].setdefault(key, block) is not block:
                self._add(key, block)

    def seal_unindexed(self, block: int, key: bytes) -> None:
        """Give a held block a key that does not lead to it. NO_KEY: it has none yet; the one that it gets will not."""
        if key != NO_KEY:
            self.of[block] = key
        self._marks.unindex(block)

    def _add(self, key: bytes, block: int) -> None:
        """Let a key lead to a block after the others that carry it."""
        shard = self._shards[key[0]]
        carriers = shard[key]
        if type(carriers) is list:
            if block not in carriers:
                carriers.append(block)
        elif carriers != block:
            shard[key] = [carriers, block]  # type: ignore[list-item]

    def discard(self, block: int) -> None:
        """Let a block's key, if it has one, no longer lead to it. The block keeps the key."""
        key = self.of[block]
        if key is not None:
            self._discard(key, block)

    def _discard(self, key: bytes, block: int) -> None:
        shard = self._shards[key[0]]
        carriers = shard.get(key)
        if carriers == block:
            del shard[key]
        elif type(carriers) is list and block in carriers:
            carriers.remove(block)
            if len(carriers) == 1:
                shard[key] = carriers[0]

    def forget(self, block: int) -> bytes:
        """Remove a keyed block from the index, and return the key that it had."""
        key = self.of[block]
        assert key is not None, "only keyed blocks are forgotten"
        self.of[block] = None
        self._discard(key, block)
        return key

    def drop(self, block: int) -> None:
        """Remove the key of a block that is not in the index."""
        self.of[block] = None

    def unindexing(self) -> Iterator[int]:
        """Empty the index; the blocks keep their keys. Pauses after every slice with its units of work."""
        for start in range(1, len(self.of), _SLICE):
            yield _SLICE
            for block, key in enumerate(self.of[start : start + _SLICE], start):
                if key is not None and not self._marks.of[block]:
                    self._discard(key, block)
                    self._marks.set(block, UNINDEXED)

    def clearing(self, entries: int) -> Iterator[None]:
        """Give the memory back, pausing after so many entries."""
        for shard in self._distinct:
            while shard:
                for _ in range(min(len(shard), entries)):
                    shard.popitem()
                yield
        while self.of:
            del self.of[-entries:]
            yield

    def sealing_order(self) -> dict[int, bytes]:
        """Return the blocks in the index with their keys; those of one key stand in the order of their sealing."""
        return {block: key for key, block in self._entries()}

    def _entries(self) -> Iterator[tuple[bytes, int]]:
        for shard in self._distinct:
            for key, carriers in shard.items():
                for block in _listed(carriers):
                    yield key, block

    def answers(self, block: int) -> bool:
        """Return whether the block is the one that is found under its key."""
        key = self.of[block]
        return key is not None and not self._marks.of[block] and self.find(key) == block

    def block_faults(self, block: int) -> list[BlockFault]:
        """Check that a block's key, if it has one that should, leads to it and to no block of another key first."""
        key = self.of[block]
        if key is None or self._marks.of[block] & UNINDEXED:
            return []
        carriers = self.carriers(key)
        faults = [] if block in carriers else [BlockFault(block, f"block {block} is not in the index under its key")]
        first = carriers[0] if carriers else block
        if self.of[first] != key and not self._marks.of[first]:
            faults.append(BlockFault(first, f"block {first} is found under the key of block {block}, which it has not"))
        return faults

    def checking(self) -> Iterator[list[BlockFault]]:
        """Check that no key leads to a block that has another one, pausing after each slice with what was found.

        Keys that lead to blocks that were blamed are dropped: `find` passes over them, but they are no good.
        """
        for shard in self._distinct:
            faults = []
            for key, carriers in list(shard.items()):
                for block in list(_listed(carriers)):
                    if self._marks.of[block]:
                        self._discard(key, block)
                    elif self.of[block] != key:
                        faults.append(BlockFault(block, f"block {block} is found under a key that it has not"))
                        self._discard(key, block)
            yield faults

    def violations(self) -> list[str]:
        """Return a sentence for each block that is found under a key that it has not."""
        return [
            f"block {block} is found under a key that it has not"
            for key, block in self._entries()
            if self.of[block] != key and not self._marks.of[block]
        ]


def _listed(carriers: Carriers) -> list[int]:
    return carriers if isinstance(carriers, list) else [carriers]
