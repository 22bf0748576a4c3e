"""Tracks which keys a prompt can hit, and updates them after each block step.

The key index of each tier records which keys it gained or may have lost (`KeyIndex.journal`). After a block step, the
state of each of these keys is compared with what was announced, so the order of events within a block step does not
matter.

A key of kind 0 is announced while a prompt can reach it: while the pool has blocks of it and of all keys before it, in
whichever tier. A block whose predecessors are gone is withdrawn with them, and announced again when they are back; so
whoever follows the events never holds a block whose parent was removed. Window kinds lack the blocks before their
windows, so their keys are announced wherever they have blocks.
"""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from blocks import Refusal, Reset, Step, StepItem
from kvmanager import PoolState
from kvmanager.tier.key_index import KeyIndex
from services.engine.events.changes import Cleared, KeyChange, KeyPlace, Medium
from services.engine.events.event_stream import MOST_BLOCKS
from services.engine.events.known_keys import KnownKeys
from services.engine.events.origins import ChainEnd, Origin, OriginFields, chain_ends, committed_origins
from services.engine.events.runs import Runs

# Keys of a snapshot that are looked at without a pause: about half a millisecond.
_SLICE = 512
# The places of kind 0, whose keys form chains.
_CHAINED = 0b11


class _Indexed(NamedTuple):
    """A place, its bit, and the key index of its blocks."""

    place: KeyPlace
    bit: int
    keys: KeyIndex


class Announcements:
    """Turns block steps into changes of the announced keys. Belongs to the event loop."""

    def __init__(self, state: PoolState, adopted: Mapping[bytes, OriginFields], *, salts: bytes | None) -> None:
        """Follow a pool from now on. `adopted` has the origins of keys that it has already.

        Keys of unknown origin are not announced; nor are those of chains with a salt, unless
        `salts` is the key of their digests.
        """
        self._state = state
        self._salts = salts
        self._indices = tuple(_indices(state))
        self._places = [(place, bit) for place, bit, _ in self._indices]
        self._keys = KnownKeys(len(self._places), _CHAINED)
        self._hidden: set[bytes] = set()
        self._origins: dict[bytes, OriginFields] = {}  # of the block steps since the last update
        self._stored: dict[bytes, None] = {}
        self._withdrawn: dict[bytes, None] = {}
        self._announced = 0
        self._ends: dict[int, ChainEnd] = {}
        self._reset = False
        for _, _, index in self._indices:
            index.journal = [key for key, _ in index.entries()]
        self._origins.update((key, (*origin,)) for key, origin in adopted.items())
        self._update()

    def __len__(self) -> int:
        """Number of keys that are announced in at least one place."""
        return self._announced

    @property
    def hidden(self) -> int:
        """Number of keys that cannot be announced: their tokens are unknown, or their salts are omitted."""
        return len(self._hidden)

    def origin(self, key: bytes) -> Origin | None:
        """Return where a key with blocks comes from, None if that is unknown or must not be published."""
        return Origin(*self._keys.origin(key)) if key in self._keys else None

    def fields(self, key: bytes) -> OriginFields | None:
        """Return the same as plain values, also of keys that the block steps since the last changes have set."""
        return self._origins.get(key) or self._keys.find(key)

    def before(self, step: Step) -> None:
        """Record what a block step that is applied next commits to."""
        self._ends = chain_ends(self._state, step, self._salts or b"") if step.commits else {}

    def applied(self, step: Step, refusals: Sequence[Refusal]) -> None:
        """Record the tokens that the last block step has committed, and whether it was a reset."""
        if step.commits:
            refused = [one.position for one in refusals if one.item is StepItem.COMMIT]
            self._learn(committed_origins(step, self._ends, refused, self._state.block_size))
        if step.pins:
            self._reset |= any(isinstance(pin, Reset) for pin in step.pins)

    def changes(self) -> list[KeyChange]:
        """Return what has changed since the last call.

        Parents come before their children, and a copy in another place before the removal of what it replaces.
        """
        if self._reset:
            return self._changes_of_reset()
        if any(keys.journal for _, _, keys in self._indices):
            return self._update()
        self._origins.clear()
        return []

    def _changes_of_reset(self) -> list[KeyChange]:
        """Rebuild from the keys that remain after a reset, without visiting the removed ones."""
        before, cleared = self._keys, self._announced > 0
        self._keys, self._hidden = KnownKeys(len(self._places), _CHAINED), set()
        self._announced, self._reset = 0, False
        for _, _, index in self._indices:
            index.journal = [key for key, _ in index.entries()]
            self._origins.update((key, before.origin(key)) for key in index.journal if key in before)
        changes = self._update()
        return [Cleared(), *changes] if cleared else changes

    def snapshot(self) -> Generator[list[KeyChange], None, None]:
        """Yield all announced keys in slices, parents first. The first slice clears what a follower has.

        The pool may change between two slices: each has the state of its own time. Whoever applies the slices and then
        all changes since the first one has the announced keys.
        """
        yield [Cleared()]
        listed: set[bytes] = set()
        runs = Runs(self._places)
        for count, key in enumerate(list(self._keys), 1):
            for one in self._unlisted_chain(key, listed):
                if announced := self._keys.announced(one):  # unless it is gone since the last slice
                    runs.add(one, self._keys.origin(one), announced)
                if runs.blocks >= MOST_BLOCKS:
                    yield runs.take()
            if not count % _SLICE:
                yield runs.take()
        yield runs.take()

    def _unlisted_chain(self, key: bytes, listed: set[bytes]) -> list[bytes]:
        """Return an announced key behind the keys before it, the first of the chain first, without those `listed`."""
        chain: list[bytes] = []
        at: bytes | None = key
        while at is not None and at not in listed and self._keys.announced(at):
            chain.append(at)
            listed.add(at)
            at = self._keys.parent(at)
        return chain[::-1]

    def _learn(self, origins: Iterable[tuple[bytes, OriginFields]]) -> None:
        if self._salts is not None:
            self._origins.update(origins)
        else:
            self._origins.update((key, origin) for key, origin in origins if not origin[-1])

    def _update(self) -> list[KeyChange]:
        for key in self._take_journals():
            self._follow(key, sum(bit for _, bit, index in self._indices if index.find(key) is not None))
        self._origins.clear()
        stored, withdrawn = self._stored, self._withdrawn
        self._stored, self._withdrawn = {}, {}
        removed = self._removals(withdrawn)
        added = self._additions(stored)
        self._forget(withdrawn)
        return [*added, *removed]

    def _take_journals(self) -> dict[bytes, None]:
        """Return the keys that any index has recorded, each once."""
        found: dict[bytes, None] = {}
        for _, _, index in self._indices:
            if index.journal:
                found.update(dict.fromkeys(index.journal))
                index.journal = []
        return found

    def _follow(self, key: bytes, present: int) -> None:
        """Record where a key has blocks now, and what this changes for the keys behind it."""
        keys = self._keys
        if key not in keys and not self._add(key, present):
            return
        before = keys.set_present(key, present)
        if before & ~present:
            self._withdrawn[key] = None
        if present & ~before:
            self._stored[key] = None
        chained, reachable = present & _CHAINED, keys.is_reachable(key)
        if reachable and not chained:
            self._lose(key)
        elif chained and not reachable and ((parent := keys.parent(key)) is None or keys.is_reachable(parent)):
            self._reach(key)

    def _add(self, key: bytes, present: int) -> bool:
        """Add a new key; return False if it has no block or must stay hidden."""
        origin = self._origins.get(key) if present else None
        if origin is not None:
            self._keys.add(key, origin)
        if present and origin is None:
            self._hidden.add(key)
        elif self._hidden:
            self._hidden.discard(key)
        return origin is not None

    def _reach(self, key: bytes) -> None:
        """Mark a key and all that follow it as reachable, to be stored in this order."""
        keys, waiting = self._keys, [key]
        while waiting:
            at = waiting.pop()
            keys.set_reachable(at, reachable=True)
            self._stored.pop(at, None)  # its children may have been recorded before it
            self._stored[at] = None
            waiting += [one for one in keys.children(at) if keys.present(one) & _CHAINED and not keys.is_reachable(one)]

    def _lose(self, key: bytes) -> None:
        """Mark a key and all that follow it as unreachable, to be removed in the opposite order."""
        keys, order, waiting = self._keys, [], [key]
        while waiting:
            order.append(at := waiting.pop())
            keys.set_reachable(at, reachable=False)
            waiting += [child for child in keys.children(at) if keys.is_reachable(child)]
        for at in reversed(order):
            self._withdrawn.pop(at, None)
            self._withdrawn[at] = None

    def _removals(self, keys: Iterable[bytes]) -> list[KeyChange]:
        runs = Runs(self._places)
        for key in keys:
            announced, due = self._keys.announced(key), self._keys.due(key)
            if gone := announced & ~due:
                runs.remove(key, gone)
                self._keys.set_announced(key, announced & due)
                self._announced -= not announced & due
        return runs.take()

    def _additions(self, keys: Iterable[bytes]) -> list[KeyChange]:
        runs = Runs(self._places)
        for key in keys:
            announced, due = self._keys.announced(key), self._keys.due(key)
            if new := due & ~announced:
                runs.add(key, self._keys.origin(key), new)
                self._keys.set_announced(key, announced | new)
                self._announced += not announced
        return runs.take()

    def _forget(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if not self._keys.present(key):
                self._keys.remove(key)


def _indices(state: PoolState) -> Iterator[_Indexed]:
    for number, kind in enumerate(state.kinds):
        for bit, (medium, tier) in enumerate(((Medium.GPU, kind.device), (Medium.CPU, kind.host))):
            yield _Indexed(KeyPlace(number, medium), 1 << (2 * number + bit), tier.keys)
