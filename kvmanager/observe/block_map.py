"""A map of a pool's blocks: the state of each block, kept up to date by the results of block steps.

A map exists only while it is watched. It follows its pool from its creation on, as an audit does. Results are queued
while block steps are applied, and processed between block steps in slices.
"""

from array import array
from collections.abc import Generator, Iterable
from enum import Enum
from typing import NamedTuple

from kvmanager.applied import AppliedStep
from kvmanager.effects import condemned_in
from kvmanager.observe.table_follower import TableFollower
from kvmanager.pool_state import PoolState
from kvmanager.tier.tier import Tier

# Blocks that are read, and table entries that are searched, without a pause: about a third of a millisecond.
_SLICE = 400
_SLICE_SEARCHED = 20_000
_GROWTH = 50_000

_MAX_COUNT = 0xFF
_MAX_OWNER = 0xFFFF
_KEYED = 1 << 2
_PINNED = 1 << 3
_OUTLIVED = 1 << 4


class BlockState(Enum):
    """The state of a block."""

    FREE = 0
    CACHED = 1
    HELD = 2
    WITHHELD = 3


def state_of(tier: Tier, block: int) -> BlockState:
    """Return the state of a block of a tier."""
    if tier.ref_count(block):
        return BlockState.HELD
    if tier.marks.is_withheld_or_marked(block):
        return BlockState.WITHHELD
    return BlockState.FREE if tier.key(block) is None else BlockState.CACHED


class Cell(NamedTuple):
    """The map's entry of a block. `holders` is at most 255.

    `owner` is the id, modulo 65536, of the sequence that is the only holder; 0 if there is none, several, or a pin.
    `outlived` blocks have contents that an earlier process of the engine computed.
    """

    state: BlockState
    keyed: bool
    pinned: bool
    holders: int
    owner: int
    outlived: bool = False

    @classmethod
    def unpack(cls, packed: int) -> "Cell":
        """Decode a number of a map."""
        state, holders = BlockState(packed & 3), packed >> 8 & _MAX_COUNT
        flags = bool(packed & _KEYED), bool(packed & _PINNED)
        return cls(state, *flags, holders, packed >> 16, bool(packed & _OUTLIVED))


class TableEntry(NamedTuple):
    """A table entry: the sequence, the logical block, and the number of computed tokens in it."""

    sequence: int
    logical: int
    tokens: int


class MapChanges(NamedTuple):
    """Changed blocks of each tier: pairs of a block id and its new number in the map."""

    device: "array[int]"
    host: "array[int]"


class _Cells:
    """The map of one tier: a number for each block, with 2 bits of state, 3 flags, 8 bits of count, 16 of owner."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.cells = array("I", (0,))
        self.changed: set[int] = set()
        self.built = False  # before, changes need not be recorded, because all blocks will be read
        # The sum of the ids of a block's holders, which is the id of the only one. Unlike a list of ids, the sum may
        # lose a holder before the copying has added it.
        self._owners = array("q", (0,))
        self._pins: dict[int, int] = {}

    def growing(self) -> Generator[None, None, None]:
        """Allocate the map, with pauses, because allocating fresh memory takes long."""
        while (missing := self.tier.total + 1 - len(self.cells)) > 0:
            some = min(missing, _GROWTH)
            self.cells.frombytes(bytes(self.cells.itemsize * some))
            self._owners.frombytes(bytes(self._owners.itemsize * some))
            yield

    def change(self, blocks: Iterable[int], by: int, holder: int, /) -> None:
        """Add (`by` 1) or remove (-1) a holder of each block."""
        owners = self._owners
        for block in blocks:
            owners[block] += by * holder
            if not holder:
                self._pins[block] = self._pins.get(block, 0) + by
        if self.built:
            self.changed.update(blocks)

    def packed(self, block: int) -> int:
        """Return a block's number, see `Cell.unpack`."""
        tier = self.tier
        count = tier.ref_count(block)
        packed = state_of(tier, block).value | min(count, _MAX_COUNT) << 8
        if tier.key(block) is not None:
            packed |= _KEYED
        if self._pins.get(block):
            packed |= _PINNED
        if block in tier.keys.outlived:
            packed |= _OUTLIVED
        if count == 1:
            packed |= (self._owners[block] & _MAX_OWNER) << 16
        return packed

    def updating(self, blocks: Iterable[int]) -> Generator[None, None, "array[int]"]:
        """Update the numbers of blocks, in slices; return pairs of each changed block and its new number."""
        cells, packed_of, changes, done = self.cells, self.packed, array("I"), 0
        for block in blocks:
            packed = packed_of(block)
            if cells[block] != packed:
                cells[block] = packed
                changes.extend((block, packed))
            done += 1
            if done >= _SLICE:
                done = 0
                yield
        return changes


class PoolMap:
    """The maps of all kinds of blocks of a pool, kind 0 first. It must receive every block step."""

    def __init__(self, state: PoolState) -> None:
        self.kinds = [BlockMap(kind) for kind in state.kinds]

    def on_step(self, applied: AppliedStep) -> None:
        """Receive an applied block step. Its result is kept for a while and must not change."""
        for kind, own in zip(self.kinds, (applied, *applied.windows), strict=True):
            kind.on_step(own)

    def building(self) -> Generator[None, None, None]:
        """Build the maps in slices."""
        for kind in self.kinds:
            yield from kind.building()

    def updating(self) -> Generator[None, None, list[MapChanges]]:
        """Update the maps in slices; the generator's return value has the changes of each kind."""
        changes = []
        for kind in self.kinds:
            changes.append((yield from kind.updating()))
        return changes

    def __len__(self) -> int:
        """Return the number of blocks that are shown."""
        return sum(len(kind.device) + len(kind.host) for kind in self.kinds)


class BlockMap:
    """The states of all blocks of one kind. The map must receive every block step from its creation on."""

    def __init__(self, state: PoolState) -> None:
        self._state = state
        self._device = _Cells(state.device)
        self._host = _Cells(state.host)
        self._tables = TableFollower(state, self._device, self._host)
        self._resets = -1  # resets of the prefix cache that the map shows; -1 before it is built
        self._following = False

    @property
    def device(self) -> "array[int]":
        """A number for each block of the device tier, by its id; `Cell.unpack` decodes it."""
        return self._device.cells

    @property
    def host(self) -> "array[int]":
        """The same for the host tier."""
        return self._host.cells

    def on_step(self, applied: AppliedStep) -> None:
        """Receive an applied block step. Its result is kept for a while and must not change."""
        if not self._following:
            return
        self._tables.on_step(applied)
        if applied.sealed_blocks:
            self._device.changed.update(applied.sealed_blocks)
        if applied.result.device_to_host:
            self._host.changed.update(copy.destination for copy in applied.result.device_to_host)
        for condemned in condemned_in(applied.effects):
            self.touch(condemned.blocks, host=condemned.host)
        if applied.result.withheld_blocks or applied.result.host_withheld_blocks:
            self.touch(applied.result.withheld_blocks, host=False)
            self.touch(applied.result.host_withheld_blocks, host=True)

    def touch(self, blocks: Iterable[int], *, host: bool) -> None:
        """Record that blocks have changed other than by a block step."""
        (self._host if host else self._device).changed.update(blocks)

    def building(self) -> Generator[None, None, None]:
        """Build the map in slices. `device` and `host` are complete afterwards."""
        yield from self._device.growing()
        yield from self._host.growing()
        self._following = True
        yield from self._tables.copying()
        self._device.built = self._host.built = True
        yield from self.updating()

    def updating(self) -> Generator[None, None, MapChanges]:
        """Update the map in slices; the generator's return value has the changes.

        A change by a block step between the slices is in this return value or in the next one.
        """
        self._tables.catch_up()
        changes = []
        everything, self._resets = self._resets != self._tables.resets, self._tables.resets
        for cells in (self._device, self._host):
            changed, cells.changed = cells.changed, set()
            blocks: Iterable[int] = range(1, cells.tier.total + 1) if everything else changed
            changes.append((yield from cells.updating(blocks)))
        return MapChanges(*changes)


def entries_of(state: PoolState, block: int, *, host: bool, kind: int = 0) -> Generator[None, None, list[TableEntry]]:
    """Find the table entries of a block of a kind, in slices; the generator's return value lists them."""
    found, done, tables = [], 0, state.kinds[kind].sequences
    for sequence_id in list(state.sequences):
        sequence = tables.get(sequence_id)
        if sequence is None or sequence.swapped != host or sequence_id not in state.sequences:
            continue
        if block in sequence.table:
            index = sequence.dropped + sequence.table.index(block)
            computed = state.sequences[sequence_id].computed_tokens  # lengths are those of kind 0
            tokens = min(max(computed - index * state.block_size, 0), state.block_size)
            found.append(TableEntry(sequence_id, index, tokens))
        done += len(sequence.table) + 100
        if done >= _SLICE_SEARCHED:
            done = 0
            yield
    return found
