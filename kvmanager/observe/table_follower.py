"""Copies of a pool's tables that follow its block steps, for observers that need the holders of every block.

The tables are copied in slices, while block steps are applied in between. The results of block steps contain the
changes of tables: a change of a copied table is applied to the copy; a change of a table that is not copied yet is part
of the later copy.
"""

from collections.abc import Generator, Iterable, Iterator, Set
from dataclasses import dataclass
from itertools import islice
from typing import Generic, Protocol, TypeVar

from blocks import Pin, PinChange, Reset, TableChange, Unpin
from kvmanager.applied import AppliedStep
from kvmanager.effects import Allocated, Forked, Freed, PinsChanged, SwappedIn, SwappedOut, Trimmed, effect_of
from kvmanager.pool_state import PoolState

# Table entries that are copied without a pause: well below a third of a millisecond.
_SLICE = 300
# Maximum of results that wait for the next slice: together they take less than a millisecond.
_MAX_PENDING = 32
# The holder id of all pins; sequence ids are at least 1.
PIN_HOLDER = 0


class Holders(Protocol):
    """An observer's records of the holders of a tier's blocks."""

    def change(self, blocks: Iterable[int], by: int, holder: int, /) -> None:
        """Add (`by` 1) or remove (-1) a holder of each block. During copying, the number may be below 0."""


H = TypeVar("H", bound=Holders)


@dataclass(slots=True)
class FollowedTable(Generic[H]):
    """A table with the holders of its tier. Its first entry is logical block `dropped`."""

    holders: H
    blocks: list[int]
    dropped: int = 0


class TableFollower(Generic[H]):
    """The tables and pins of a pool according to the results of its block steps. Complete after `copying`."""

    def __init__(self, state: PoolState, device: H, host: H) -> None:
        """Start without tables. The follower must receive every block step of this kind from now on."""
        self.changes = 0  # received results
        self.resets = 0  # resets of the prefix cache in the followed results
        self._state = state
        self._device = device
        self._host = host
        self._tables: dict[int, FollowedTable[H]] = {}
        self._pins: dict[str, list[int]] = {}
        self._pending: list[AppliedStep] = []

    def on_step(self, applied: AppliedStep) -> None:
        """Receive an applied block step. Its result is kept for a while and must not change."""
        if applied.effects or applied.result.tables:
            self.changes += 1
            self._pending.append(applied)
            if len(self._pending) >= _MAX_PENDING:
                self.catch_up()

    def of(self, sequence: int) -> FollowedTable[H]:
        """Return the table of a sequence, which is empty if the sequence is unknown."""
        return self._tables.get(sequence) or FollowedTable(self._device, [])

    def catch_up(self) -> None:
        """Apply the changes of all received results."""
        pending, self._pending = self._pending, []
        for applied in pending:
            self.follow(applied)

    def copying(self) -> Iterator[None]:
        """Copy all tables and pins that are not copied yet, and add them to the holders, in slices."""
        yield from self._awaiting_step()
        self.catch_up()
        copied = 0
        for sequence_id in list(self._state.sequences):
            yield from self._awaiting_step()
            sequence = self._state.sequences.get(sequence_id)
            if sequence is not None and sequence_id not in self._tables:
                holders = self._host if sequence.swapped else self._device
                self._tables[sequence_id] = FollowedTable(holders, list(sequence.table), sequence.dropped)
                copied = yield from self._adding(holders, list(sequence.table), sequence_id, copied)
        for pin in list(self._state.pins):
            yield from self._awaiting_step()
            if pin in self._state.pins and pin not in self._pins:
                self._pins[pin] = list(self._state.pins[pin])
                copied = yield from self._adding(self._device, list(self._state.pins[pin]), PIN_HOLDER, copied)
        yield
        self.catch_up()

    def _awaiting_step(self) -> Iterator[None]:
        """Pause until a partially applied block step is complete, because its result assumes the tables before it."""
        while self._state.stepping:
            yield
            self.catch_up()

    def _adding(self, holders: H, table: list[int], holder: int, done: int) -> Generator[None, None, int]:
        """Add a copied table to the holders, pausing after each full slice; return the entries of the last slice."""
        entries = iter(table)
        while part := list(islice(entries, _SLICE - done)):
            holders.change(part, 1, holder)
            done += len(part)
            if done >= _SLICE:
                done = 0
                yield
                self.catch_up()
        return done + 1 if done + 1 < _SLICE else 0

    def follow(self, applied: AppliedStep) -> None:
        """Apply the changes of a result to the copied tables.

        The tables of a result are in the order of forks, swaps, extends and allocates.
        """
        tables = iter(applied.result.tables)
        begun: set[int] = set()
        for effect in map(effect_of, applied.effects):
            match effect:
                case Allocated():
                    begun.add(effect.sequence)
                case Forked():
                    begun.add(effect.child)
                    self._change_table(next(tables), begun)
                    self._change_table(next(tables), begun)
                case Trimmed():
                    self._trim(effect)
                case Freed():
                    self._forget(effect.sequence)
                case SwappedOut():
                    self._move(next(tables), self._host)
                case SwappedIn():
                    self._move(next(tables), self._device)
                case PinsChanged():
                    self._change_pins(effect.change, effect.blocks)
        for change in tables:
            self._change_table(change, begun)

    def _change_table(self, change: TableChange, begun: Set[int]) -> None:
        if change.sequence not in self._tables and change.sequence in begun:
            self._tables[change.sequence] = FollowedTable(self._device, [], change.first_index)
        if table := self._tables.get(change.sequence):
            entry = change.first_index - table.dropped
            table.holders.change(table.blocks[entry:], -1, change.sequence)
            table.blocks[entry:] = change.block_ids
            table.holders.change(change.block_ids, 1, change.sequence)

    def _trim(self, effect: Trimmed) -> None:
        if table := self._tables.get(effect.sequence):
            table.holders.change(effect.blocks, -1, effect.sequence)
            del table.blocks[: len(effect.blocks)]
            table.dropped += len(effect.blocks)

    def _move(self, change: TableChange, holders: H) -> None:
        self._forget(change.sequence)
        self._tables[change.sequence] = FollowedTable(holders, list(change.block_ids), change.first_index)
        holders.change(change.block_ids, 1, change.sequence)

    def _forget(self, sequence: int) -> None:
        if table := self._tables.pop(sequence, None):
            table.holders.change(table.blocks, -1, sequence)

    def _change_pins(self, change: PinChange, blocks: Iterable[int]) -> None:
        match change:
            case Pin(pin_id):
                # A pin, like a table, may have been copied between two slices of its block step.
                self._device.change(self._pins.get(pin_id, ()), -1, PIN_HOLDER)
                self._pins[pin_id] = list(blocks)
                self._device.change(blocks, 1, PIN_HOLDER)
            case Unpin(pin_id) if pin_id in self._pins:
                self._device.change(self._pins.pop(pin_id), -1, PIN_HOLDER)
            case Reset():
                self.resets += 1
