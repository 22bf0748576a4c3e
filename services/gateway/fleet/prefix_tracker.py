"""What a gateway knows of the prefixes that an engine has cached: what it has sent there."""

from collections import Counter, OrderedDict
from collections.abc import Sequence

Keys = Sequence[bytes]


class PrefixTracker:
    """The prefixes of what was sent to one engine: those of its live requests, and the last ones that its pool holds.

    It forgets as the engine does: what was used longest ago, tails before heads.
    """

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._recent: OrderedDict[bytes, None] = OrderedDict()
        self._live: Counter[bytes] = Counter()

    def sent(self, keys: Keys) -> None:
        """A request of these was sent."""
        self._live.update(keys)
        for key in reversed(keys):
            self._recent[key] = None
            self._recent.move_to_end(key)
        while len(self._recent) > self._blocks:
            self._recent.popitem(last=False)

    def ended(self, keys: Keys) -> None:
        """The request has ended; its blocks may go on being cached."""
        self._live.subtract(keys)
        for key in keys:
            if not self._live[key]:
                del self._live[key]

    def cached_blocks(self, keys: Keys) -> int:
        """Return how many leading blocks the engine should have, by memory alone."""
        return _leading(keys, 0, self._recent)

    def cached_blocks_beyond(self, keys: Keys, known: int) -> int:
        """Return how many leading blocks it has when it surely has `known` of them: live requests add theirs."""
        return _leading(keys, known, self._live)


def _leading(keys: Keys, start: int, among: "OrderedDict[bytes, None] | Counter[bytes]") -> int:
    blocks = start
    while blocks < len(keys) and keys[blocks] in among:
        blocks += 1
    return blocks
