"""Runs: keys that are announced one after the other, grouped into changes."""

from collections.abc import Sequence

from services.engine.events.changes import KeyChange, KeyPlace, Removed, Stored
from services.engine.events.event_stream import MOST_BLOCKS
from services.engine.events.origins import OriginFields

_NONE: tuple[list[bytes], list[bytes], str] = ([], [], "")


class Runs:
    """Groups keys by place: stored ones as long as each is the parent of the next, removed ones as they come."""

    def __init__(self, places: Sequence[tuple[KeyPlace, int]]) -> None:
        """Start empty. `places` has each place with its bit."""
        self._places = places
        self._changes: list[KeyChange] = []
        self._stored: dict[KeyPlace, tuple[list[bytes], list[bytes], str]] = {}
        self._removed: dict[KeyPlace, list[bytes]] = {}
        self.blocks = 0

    def add(self, key: bytes, origin: OriginFields, places: int) -> None:
        """Add a stored key; `places` has the bits of its places."""
        for place, bit in self._places:
            if places & bit:
                self.blocks += 1
                self._add(place, key, origin)

    def remove(self, key: bytes, places: int) -> None:
        """Add a removed key; `places` has the bits of the places that it has left."""
        for place, bit in self._places:
            if places & bit:
                self.blocks += 1
                self._remove(place, key)

    def take(self) -> list[KeyChange]:
        """Return the changes since the last call, of MOST_BLOCKS blocks at most each."""
        changes = self._changes
        self._changes, self._stored, self._removed, self.blocks = [], {}, {}, 0
        return changes

    def _add(self, place: KeyPlace, key: bytes, origin: OriginFields) -> None:
        hashed, first, own, salt = origin
        keys, tokens, of = self._stored.get(place, _NONE)
        if first or not keys or keys[-1] != hashed or of != salt or len(keys) >= MOST_BLOCKS:
            keys, tokens = [], []
            self._stored[place] = keys, tokens, salt
            self._changes.append(Stored(place, None if first else hashed, keys, tokens, salt))
        keys.append(key)
        tokens.append(own)

    def _remove(self, place: KeyPlace, key: bytes) -> None:
        keys = self._removed.get(place)
        if keys is None or len(keys) >= MOST_BLOCKS:
            keys = self._removed[place] = []
            self._changes.append(Removed(place, keys))
        keys.append(key)
