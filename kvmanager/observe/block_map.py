"""A map of a pool's blocks: what each of them is, kept up to date by the answers to its Steps.

It costs something only while somebody looks: a map follows its pool from its making on, as an audit does. The answers
are put aside while Steps are applied, and looked at between them, a slice at a time.
"""

from array import array
from collections.abc import Generator, Iterable
from enum import Enum
from typing import NamedTuple

from kvmanager.applied import AppliedStep
from kvmanager.observe.table_follower import TableFollower
from kvmanager.pool_state import PoolState
from kvmanager.tier.tier import Tier

# Blocks that are looked at without a pause, and entries of tables that are searched: about a third of a millisecond.
_SLICE = 400
_SEARCHED_TOGETHER = 20_000
_GROWTH = 50_000

_MOST_COUNT = 0xFF
_MOST_OWNER = 0xFFFF
_KEYED = 1 << 2
_PINNED = 1 << 3


class BlockState(Enum):
    """Where a block is: in exactly one of these places."""

    FREE = 0
    CACHED = 1
    HELD = 2
    WITHHELD = 3


def state_of(tier: Tier, block: int) -> BlockState:
    """Return where a block of a tier is."""
    if tier.count(block):
        return BlockState.HELD
    if tier.marks.is_out(block):
        return BlockState.WITHHELD
    return BlockState.FREE if tier.key(block) is None else BlockState.CACHED


class Cell(NamedTuple):
    """What a map says of a block. `holders` is 255 where there are more.

    `owner` is the sequence that holds the block alone, its id modulo 65536; 0: nobody does, or several do, or a pin.
    """

    state: BlockState
    keyed: bool
    pinned: bool
    holders: int
    owner: int

    @classmethod
    def of(cls, packed: int) -> "Cell":
        """Read a number of a map."""
        state, holders = BlockState(packed & 3), packed >> 8 & _MOST_COUNT
        return cls(state, bool(packed & _KEYED), bool(packed & _PINNED), holders, packed >> 16)


class TableEntry(NamedTuple):
    """A sequence, which of its logical blocks it is, and the tokens of it that are computed."""

    sequence: int
    logical: int
    tokens: int


class MapChanges(NamedTuple):
    """Blocks that have changed, each followed by what it is now; of the device tier and of the host tier."""

    device: "array[int]"
    host: "array[int]"


class _Cells:
    """The map of one tier: for each block a number, of 2 bits for its state, flags, 8 bits of count, 16 of owner."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.cells = array("I", (0,))
        self.changed: set[int] = set()
        self.drawn = False  # until then everything will be looked at anyway
        # Ids of a block's holders, added up: where there is one, the sum is its id. Unlike a list of them, this bears
        # that a holder leaves before the copying has come to it.
        self._owners = array("q", (0,))
        self._pins: dict[int, int] = {}

    def growing(self) -> Generator[None, None, None]:
        """Make room for all blocks, with pauses: fresh memory takes its time."""
        while (missing := self.tier.total + 1 - len(self.cells)) > 0:
            some = min(missing, _GROWTH)
            self.cells.frombytes(bytes(self.cells.itemsize * some))
            self._owners.frombytes(bytes(self._owners.itemsize * some))
            yield

    def change(self, blocks: Iterable[int], by: int, holder: int, /) -> None:
        """Add a holder of each block, or take one away."""
        owners = self._owners
        for block in blocks:
            owners[block] += by * holder
            if not holder:
                self._pins[block] = self._pins.get(block, 0) + by
        if self.drawn:
            self.changed.update(blocks)

    def look(self, block: int) -> int:
        """Return what a block is now."""
        tier = self.tier
        count = tier.count(block)
        packed = state_of(tier, block).value | min(count, _MOST_COUNT) << 8
        if tier.key(block) is not None:
            packed |= _KEYED
        if self._pins.get(block):
            packed |= _PINNED
        if count == 1:
            packed |= (self._owners[block] & _MOST_OWNER) << 16
        return packed

    def looking(self, blocks: Iterable[int]) -> Generator[None, None, "array[int]"]:
        """Look at blocks, in slices; return those that are not what they were, each followed by what it is now."""
        cells, look, changes, done = self.cells, self.look, array("I"), 0
        for block in blocks:
            packed = look(block)
            if cells[block] != packed:
                cells[block] = packed
                changes.extend((block, packed))
            done += 1
            if done >= _SLICE:
                done = 0
                yield
        return changes


class BlockMap:
    """What each block of a pool is. It has to receive every Step from its making on."""

    def __init__(self, state: PoolState) -> None:
        self._state = state
        self._device = _Cells(state.device)
        self._host = _Cells(state.host)
        self._tables = TableFollower(state, self._device, self._host)
        self._resets = -1  # that the map has seen; none before it is drawn
        self._begun = False

    @property
    def device(self) -> "array[int]":
        """A number for each block of the device tier, by its id, as `Cell.of` reads it."""
        return self._device.cells

    @property
    def host(self) -> "array[int]":
        """The same of the host tier."""
        return self._host.cells

    def on_step(self, applied: AppliedStep) -> None:
        """Receive a Step that was applied. Keeps what is needed of it, which must not change any more."""
        if not self._begun:
            return
        self._tables.on_step(applied)
        if applied.sealed_blocks:
            self._device.changed.update(applied.sealed_blocks)
        if applied.result.device_to_host:
            self._host.changed.update(copy.destination for copy in applied.result.device_to_host)
        if applied.result.withheld_blocks or applied.result.host_withheld_blocks:
            self.touch(applied.result.withheld_blocks, host=False)
            self.touch(applied.result.host_withheld_blocks, host=True)

    def touch(self, blocks: Iterable[int], *, host: bool) -> None:
        """Look at these blocks again: something else than a Step has changed them."""
        (self._host if host else self._device).changed.update(blocks)

    def building(self) -> Generator[None, None, None]:
        """Draw the map for the first time, in slices."""
        yield from self._device.growing()
        yield from self._host.growing()
        self._begun = True
        yield from self._tables.copying()
        self._device.drawn = self._host.drawn = True
        yield from self.updating()

    def updating(self) -> Generator[None, None, MapChanges]:
        """Bring the map up to date, in slices; the generator's return value says what has changed.

        What Steps change between the slices is in this answer or in the next one.
        """
        self._tables.catch_up()
        changes = []
        everything, self._resets = self._resets != self._tables.resets, self._tables.resets
        for cells in (self._device, self._host):
            changed, cells.changed = cells.changed, set()
            blocks: Iterable[int] = range(1, cells.tier.total + 1) if everything else changed
            changes.append((yield from cells.looking(blocks)))
        return MapChanges(*changes)


def entries_of(state: PoolState, block: int, *, host: bool) -> Generator[None, None, list[TableEntry]]:
    """Find the tables that have a block, in slices; the generator's return value lists their entries."""
    found, done = [], 0
    for number in list(state.sequences):
        sequence = state.sequences.get(number)
        if sequence is None or sequence.swapped != host:
            continue
        if block in sequence.table:
            index = sequence.table.index(block)
            tokens = min(max(sequence.computed - index * state.block_size, 0), state.block_size)
            found.append(TableEntry(number, index, tokens))
        done += len(sequence.table) + 100
        if done >= _SEARCHED_TOGETHER:
            done = 0
            yield
    return found
