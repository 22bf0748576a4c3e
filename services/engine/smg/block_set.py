"""The blocks that an engine has announced: built from slices of a snapshot while events go on."""

from collections.abc import Iterable, Iterator

from services.engine.events.changes import Cleared, KeyChange, KeyPlace, Removed, Stored
from services.engine.events.event_stream import MOST_BLOCKS
from services.engine.events.origins import OriginFields
from services.engine.events.runs import Runs

# Keys that are looked at without a pause.
_SLICE = 512


class BlockSet:
    """Keys with their places. The last change of a key counts, so slices and events may repeat each other."""

    def __init__(self) -> None:
        self._origins: dict[bytes, OriginFields] = {}
        self._places: dict[bytes, int] = {}  # of each key, a bit for each place
        self._bits: dict[KeyPlace, int] = {}

    def apply(self, changes: Iterable[KeyChange]) -> None:
        """Take changes, in their order."""
        for change in changes:
            match change:
                case Stored():
                    self._add(change)
                case Removed(place, keys):
                    self._remove(keys, self._bit(place))
                case Cleared():
                    self._origins.clear()
                    self._places.clear()

    def blocks(self) -> int:
        """Return the number of blocks, of all places."""
        return sum(places.bit_count() for places in self._places.values())

    def parts(self) -> Iterator[list[KeyChange]]:
        """Yield the blocks, parents first, in parts of about MOST_BLOCKS. The first one begins with Cleared.

        Some parts are empty: a slice of work that completes none.
        """
        listed: set[bytes] = set()
        runs, cleared = Runs(list(self._bits.items())), list[KeyChange]([Cleared()])
        for count, key in enumerate(self._places, 1):
            for one in self._unlisted_chain(key, listed):
                runs.add(one, self._origins[one], self._places[one])
            if runs.blocks >= MOST_BLOCKS:
                yield cleared + runs.take()
                cleared = []
            elif not count % _SLICE:
                yield []
        if cleared or runs.blocks:
            yield cleared + runs.take()

    def _unlisted_chain(self, key: bytes, listed: set[bytes]) -> list[bytes]:
        """Return a key behind the keys before it, the first of the chain first, without those `listed`."""
        chain: list[bytes] = []
        while key in self._places and key not in listed:
            chain.append(key)
            listed.add(key)
            key = self._origins[key][0]
        return chain[::-1]

    def _add(self, stored: Stored) -> None:
        bit, hashed, first = self._bit(stored.place), stored.parent or b"", stored.parent is None
        for key, tokens in zip(stored.keys, stored.tokens, strict=True):
            self._origins[key] = hashed, first, tokens, stored.salt
            self._places[key] = self._places.get(key, 0) | bit
            hashed, first = key, False

    def _remove(self, keys: Iterable[bytes], bit: int) -> None:
        for key in keys:
            if left := self._places.get(key, 0) & ~bit:
                self._places[key] = left
            elif self._places.pop(key, None) is not None:
                del self._origins[key]

    def _bit(self, place: KeyPlace) -> int:
        return self._bits.setdefault(place, 1 << len(self._bits))
