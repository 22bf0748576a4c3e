"""Random changes of the keys of a pool, and the state that they lead to."""

import random
from array import array
from collections.abc import Generator
from hashlib import sha256

from blocks import WindowKind
from services.engine.events.changes import Cleared, KeyChange, KeyPlace, Medium, Removed, Stored
from services.engine.events.event_stream import EventStream

BLOCK_SIZE = 4
PLACES = [KeyPlace(kind, medium) for kind in (0, 1) for medium in Medium]


def key(number: int) -> bytes:
    return sha256(number.to_bytes(8, "big")).digest()


def tokens(number: int, size: int = BLOCK_SIZE) -> bytes:
    return array("i", [number * size + at for at in range(size)]).tobytes()


def stored(first: int, count: int, parent: int | None = None, place: KeyPlace = PLACES[0], salt: str = "") -> Stored:
    """Blocks `first`, `first` + 1, ... of one chain."""
    numbers = range(first, first + count)
    return Stored(place, None if parent is None else key(parent), [*map(key, numbers)], [*map(tokens, numbers)], salt)


def removed(*numbers: int, place: KeyPlace = PLACES[0]) -> Removed:
    return Removed(place, [*map(key, numbers)])


class Keys:
    """The simplest pool of keys that announces its changes: a tree in each place, whose leaves go first."""

    windows = (WindowKind("window-8", 8, 64),)

    def __init__(self, stream: EventStream, seed: int) -> None:
        self.stream = stream
        self.random = random.Random(seed)
        self.parents: dict[KeyPlace, dict[int, int | None]] = {place: {} for place in PLACES}
        self._next = 0
        stream.snapshot = self.snapshot

    def change(self) -> None:
        """Publish some random changes at once."""
        self.stream.publish([self._one() for _ in range(self.random.randint(1, 4))])

    def grow(self, blocks: int) -> None:
        """Publish one chain."""
        self.stream.publish([self._store(PLACES[0], None, blocks)])

    def _one(self) -> KeyChange:
        place = self.random.choice(PLACES)
        held, dice = self.parents[place], self.random.random()
        if dice < 0.01:
            for one in self.parents.values():
                one.clear()
            return Cleared()
        if dice < 0.4 and (leaves := sorted(set(held) - set(held.values()))):
            gone = self.random.choice(leaves)
            del held[gone]
            return removed(gone, place=place)
        parent = self.random.choice([None, *held])
        return self._store(place, parent, self.random.randint(1, 3))

    def _store(self, place: KeyPlace, parent: int | None, count: int) -> Stored:
        first, self._next = self._next, self._next + count
        for number in range(first, first + count):
            self.parents[place][number] = number - 1 if number > first else parent
        return stored(first, count, parent, place)

    def snapshot(self) -> Generator[list[KeyChange], None, None]:
        """The live state, place by place, parents first."""
        yield [Cleared()]
        for place in PLACES:
            for number in list(self.parents[place]):
                if number in self.parents[place]:  # it may be gone since the list was made
                    yield [stored(number, 1, self.parents[place][number], place)]

    def counts(self) -> dict[tuple[int, str], int]:
        """The number of blocks in each place that has some."""
        return {place: len(held) for place, held in sorted(self.state().items())}

    def state(self) -> dict[tuple[int, str], set[int]]:
        """Hashes on the wire by place."""
        return {
            (place.kind, place.medium.value): {int.from_bytes(key(one)[-8:], "big") for one in held}
            for place, held in self.parents.items()
            if held
        }
