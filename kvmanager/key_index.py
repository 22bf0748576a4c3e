"""Which blocks carry a key, in sealing order.

A dict that grows copies all it has at once, which takes tens of milliseconds at a million keys. So a large pool has
many, among which the first bytes of the keys decide: keys are digests, which spread evenly.
"""

from collections.abc import Iterator

_BYTES = 256
# Keys that a dict has at most, more or less: to copy so many takes some 0.2 ms.
_SHARD_KEYS = 8192

Carriers = int | list[int]


class KeyIndex:
    """The carriers of each key; nearly every key has one, which then stands for itself."""

    def __init__(self, most_keys: int) -> None:
        """Start without keys."""
        number = 1
        while number < _BYTES and number * _SHARD_KEYS < most_keys:
            number *= 2
        self.distinct: list[dict[bytes, Carriers]] = [{} for _ in range(number)]
        self.shards = self.distinct * (_BYTES // number)  # by the first byte

    def __len__(self) -> int:
        """How many keys there are."""
        return sum(map(len, self.distinct))

    def carriers(self, key: bytes) -> list[int]:
        """Return the blocks that carry a key, in sealing order."""
        return listed(self.shards[key[0]].get(key, []))

    def add(self, key: bytes, block: int) -> None:
        """Let a key lead to a block after the others that carry it."""
        shard = self.shards[key[0]]
        carriers = shard.setdefault(key, block)
        if type(carriers) is list:
            if block not in carriers:
                carriers.append(block)
        elif carriers != block:
            shard[key] = [carriers, block]  # type: ignore[list-item]

    def discard(self, key: bytes, block: int) -> None:
        """Let a key no longer lead to a block, if it does."""
        shard = self.shards[key[0]]
        carriers = shard.get(key)
        if carriers == block:
            del shard[key]
        elif type(carriers) is list and block in carriers:
            carriers.remove(block)
            if len(carriers) == 1:
                shard[key] = carriers[0]

    def items(self) -> Iterator[tuple[bytes, Carriers]]:
        """Yield the keys with their carriers. The index must not change between two keys of a shard."""
        for shard in self.distinct:
            yield from shard.items()


def listed(carriers: Carriers) -> list[int]:
    """Return carriers as a list."""
    return carriers if isinstance(carriers, list) else [carriers]
