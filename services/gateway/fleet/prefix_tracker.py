"""The prefixes that a gateway expects an engine to have cached, because it sent requests with them there."""

from collections import Counter, OrderedDict
from collections.abc import Sequence

Keys = Sequence[bytes]


class PrefixTracker:
    """The block keys of an engine's in-flight requests, and an LRU of recent ones as large as the engine's pool.

    It evicts in the engine's order: least recently used first, the tail of a prefix before its head.
    """

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._recent: OrderedDict[bytes, None] = OrderedDict()
        self._in_flight: Counter[bytes] = Counter()

    def add(self, keys: Keys) -> None:
        """Record the block keys of a request that was sent."""
        self._in_flight.update(keys)
        for key in reversed(keys):
            self._recent[key] = None
            self._recent.move_to_end(key)
        while len(self._recent) > self._blocks:
            self._recent.popitem(last=False)

    def remove(self, keys: Keys) -> None:
        """Record the end of a request; its keys stay in the LRU."""
        self._in_flight.subtract(keys)
        for key in keys:
            if not self._in_flight[key]:
                del self._in_flight[key]

    def expected_blocks(self, keys: Keys) -> int:
        """Return the number of leading blocks that the LRU has."""
        return _leading(keys, 0, self._recent)

    def confirmed_blocks(self, keys: Keys, cached: int) -> int:
        """Return the number of leading blocks: `cached` according to the KV manager, then those of live requests."""
        return _leading(keys, cached, self._in_flight)


def _leading(keys: Keys, start: int, among: "OrderedDict[bytes, None] | Counter[bytes]") -> int:
    blocks = start
    while blocks < len(keys) and keys[blocks] in among:
        blocks += 1
    return blocks
