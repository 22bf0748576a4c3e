"""The keys that have blocks, as plain values in dicts, because the garbage collector does not traverse them.

A million keys are a million blocks; as objects, they would hold up the engine at each collection.
"""

from collections.abc import Iterable, Iterator

from services.engine.events.origins import OriginFields

_REACHABLE = 1


class KnownKeys:
    """Keys with their origins, the keys behind each, and flags: where each has blocks, and where it is announced.

    Places are bits; `width` is the number of places. The keys of places in `chained` form chains.
    """

    def __init__(self, width: int, chained: int) -> None:
        """Start empty."""
        self._mask = (1 << width) - 1
        self._announced_shift = width + 1
        self._chained = chained
        self._flags: dict[bytes, int] = {}
        self._origins: dict[bytes, OriginFields] = {}
        self._children: dict[bytes, bytes | dict[bytes, None]] = {}  # a chain rarely forks

    def __contains__(self, key: bytes) -> bool:
        return key in self._flags

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._flags)

    def __len__(self) -> int:
        return len(self._flags)

    def add(self, key: bytes, origin: OriginFields) -> None:
        """Add a key without blocks."""
        self._flags[key] = 0
        self._origins[key] = origin
        hashed, first, _, _ = origin
        if not first:
            self._add_child(hashed, key)

    def remove(self, key: bytes) -> None:
        """Remove a key, which is known again only with a new origin."""
        hashed, first, _, _ = self._origins.pop(key)
        del self._flags[key]
        if not first:
            self._remove_child(hashed, key)

    def origin(self, key: bytes) -> OriginFields:
        """Return where a known key comes from."""
        return self._origins[key]

    def find(self, key: bytes) -> OriginFields | None:
        """Return where a key comes from, None for an unknown one."""
        return self._origins.get(key)

    def parent(self, key: bytes) -> bytes | None:
        """Return the key before a known one, None for the first of a chain."""
        hashed, first, _, _ = self._origins[key]
        return None if first else hashed

    def children(self, key: bytes) -> Iterable[bytes]:
        """Return the known keys behind a key."""
        found = self._children.get(key, ())
        return (found,) if isinstance(found, bytes) else found

    def present(self, key: bytes) -> int:
        """Return the places where a known key has blocks."""
        return self._flags[key] >> 1 & self._mask

    def announced(self, key: bytes) -> int:
        """Return the places where a key is announced, none for an unknown one."""
        return self._flags.get(key, 0) >> self._announced_shift

    def is_reachable(self, key: bytes) -> bool:
        """Whether a prompt reaches a key."""
        return bool(self._flags.get(key, 0) & _REACHABLE)

    def due(self, key: bytes) -> int:
        """Return the places where a known key is to be announced."""
        flags = self._flags[key]
        present = flags >> 1 & self._mask
        return present if flags & _REACHABLE else present & ~self._chained

    def set_present(self, key: bytes, places: int) -> int:
        """Set the places where a known key has blocks; return those before."""
        flags = self._flags[key]
        self._flags[key] = flags & ~(self._mask << 1) | places << 1
        return flags >> 1 & self._mask

    def set_announced(self, key: bytes, places: int) -> None:
        """Set the places where a known key is announced."""
        flags = self._flags[key]
        self._flags[key] = flags & ((1 << self._announced_shift) - 1) | places << self._announced_shift

    def set_reachable(self, key: bytes, *, reachable: bool) -> None:
        """Set whether a prompt reaches a known key."""
        self._flags[key] = self._flags[key] & ~_REACHABLE | reachable

    def _add_child(self, parent: bytes, key: bytes) -> None:
        found = self._children.setdefault(parent, key)
        if isinstance(found, dict):
            found[key] = None
        elif found is not key:
            self._children[parent] = {found: None, key: None}

    def _remove_child(self, parent: bytes, key: bytes) -> None:
        found = self._children[parent]
        if isinstance(found, dict):
            del found[key]
            if found:
                return
        del self._children[parent]
