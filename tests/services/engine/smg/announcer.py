"""A stand-in for an engine's announcements, and for smg's index, which counts copies of blocks."""

import random
from array import array
from collections.abc import Generator

from smg_grpc_proto.generated import common_pb2

from services.engine.events.changes import Cleared, KeyChange, KeyPlace, Medium, Removed, Stored
from services.engine.events.event_stream import EventStream

PLACES = (KeyPlace(0, Medium.GPU), KeyPlace(0, Medium.CPU))
_SLICE = 3
_WEIGHTS = {"add": 30, "copy": 15, "move": 10, "remove": 8, "clear": 1, "beat": 4}


class Announcer:
    """Changes the keys of a pool at random, and publishes what it changes. A key without its parent has no place."""

    def __init__(self, seed: int, history: int = 8) -> None:
        self.stream = EventStream(1000, lambda: 1.0, history)
        self.stream.snapshot = self.snapshot
        self._random = random.Random(seed)
        self._parents: dict[bytes, bytes | None] = {}
        self.held: dict[bytes, set[KeyPlace]] = {}

    def wire_state(self) -> set[tuple[int, int]]:
        """Return the held blocks as smg knows them: hash and tier."""
        tiers = {Medium.GPU: common_pb2.KV_CACHE_TIER_DEVICE, Medium.CPU: common_pb2.KV_CACHE_TIER_HOST}
        return {(_hash(key), tiers[place.medium]) for key, places in self.held.items() for place in places}

    def change(self) -> None:
        """Publish one random change, or a heartbeat."""
        (kind,) = self._random.choices(*zip(*_WEIGHTS.items(), strict=True))
        self.stream.publish(getattr(self, f"_{kind}")())

    def snapshot(self) -> Generator[list[KeyChange], None, None]:
        """Yield slices of the state of their own time, parents first."""
        yield [Cleared()]
        keys = list(self.held)
        for start in range(0, len(keys), _SLICE):
            yield [
                self._stored(key, place)
                for key in keys[start : start + _SLICE]
                for place in PLACES
                if place in self.held.get(key, ())
            ]

    def _add(self) -> list[KeyChange]:
        parent = self._random.choice([None, *self.held])
        known = [key for key, one in self._parents.items() if one == parent and key not in self.held]
        key = self._random.choice([*known, self._random.randbytes(32)])
        self._parents[key] = parent
        place = self._random.choice(PLACES)
        self.held[key] = {place}
        return [self._stored(key, place)]

    def _copy(self) -> list[KeyChange]:
        """Give a key another place."""
        candidates = [key for key, places in self.held.items() if len(places) < len(PLACES)]
        if not candidates:
            return []
        key = self._random.choice(candidates)
        (place,) = set(PLACES) - self.held[key]
        self.held[key].add(place)
        return [self._stored(key, place)]

    def _move(self) -> list[KeyChange]:
        """Take a place from a key that has two."""
        candidates = [key for key, places in self.held.items() if len(places) > 1]
        if not candidates:
            return []
        key = self._random.choice(candidates)
        place = self._random.choice(PLACES)
        self.held[key].discard(place)
        return [Removed(place, [key])]

    def _remove(self) -> list[KeyChange]:
        """Remove a key with all that follow it, the last ones first."""
        if not self.held:
            return []
        gone = [self._random.choice(list(self.held))]
        for key in gone:
            gone += [child for child in self.held if self._parents[child] == key]
        return [Removed(place, [key]) for key in reversed(gone) for place in self.held.pop(key)]

    def _clear(self) -> list[KeyChange]:
        self.held.clear()
        return [Cleared()]

    def _beat(self) -> list[KeyChange]:
        return []

    def _stored(self, key: bytes, place: KeyPlace) -> Stored:
        return Stored(place, self._parents[key], [key], [array("i", [*key[:2]]).tobytes()], "")


class SmgIndex:
    """What smg makes of the messages of a stream. A second copy of a block or an unknown parent is a fault."""

    def __init__(self) -> None:
        self.blocks: set[tuple[int, int]] = set()
        self.sequence = 0
        self.snapshots = 0

    def apply(self, message: common_pb2.KvEventBatch) -> None:
        if message.load.load_only:
            assert not message.events
            assert message.sequence_number == self.sequence
            return
        if message.HasField("snapshot"):
            self._begin_chunk(message)
        else:
            assert message.sequence_number == self.sequence + 1
        self.sequence = message.sequence_number
        for event in message.events:
            self._apply_event(event)
        if message.HasField("snapshot") and message.snapshot.index == message.snapshot.count - 1:
            assert len(self.blocks) == message.snapshot.blocks

    def _begin_chunk(self, message: common_pb2.KvEventBatch) -> None:
        if message.snapshot.index == 0:
            self.snapshots += 1
            assert message.events[0].WhichOneof("data") == "cleared"
        else:
            assert message.sequence_number == self.sequence + 1
        assert {event.event_id for event in message.events} <= {0}

    def _apply_event(self, event: common_pb2.KvCacheEvent) -> None:
        match event.WhichOneof("data"):
            case "cleared":
                self.blocks.clear()
            case "stored":
                self._store(event.stored)
            case _:
                for one in event.removed.block_hashes:
                    self.blocks.remove((one, event.removed.tier))

    def _store(self, stored: common_pb2.KvBlocksStored) -> None:
        known = {one for one, _ in self.blocks}
        assert not stored.HasField("parent_block_hash") or stored.parent_block_hash in known
        for block in stored.blocks:
            assert (block.block_hash, stored.tier) not in self.blocks
            assert block.block_size == len(block.token_ids)
            self.blocks.add((block.block_hash, stored.tier))


def _hash(key: bytes) -> int:
    return int.from_bytes(key[-8:], "big", signed=True)
