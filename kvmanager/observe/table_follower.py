"""Copies of a pool's tables that follow its Steps. They give all holders of every block.

They are made a slice at a time, while Steps go on. Answers say how tables change, which is what an engine keeps its own
tables by: a change of a table that has been copied is made in the copy; one of a table that has not is left to the
copying, which comes later and sees it.
"""

from collections.abc import Generator, Iterable, Iterator
from itertools import islice
from typing import Generic, Protocol, TypeVar

from blocks import Pin, PinChange, Reset, TableChange, Unpin
from kvmanager.applied import AppliedStep
from kvmanager.effects import Forked, Freed, PinsChanged, SwappedIn, SwappedOut, effect_of
from kvmanager.pool_state import PoolState

# Entries of tables that are copied without a pause: well below a third of a millisecond.
_SLICE = 300
# Answers that wait for the next slice at most: together they take less than a millisecond.
_WAITING_ANSWERS = 32
# The holder of what a pin holds; sequences have ids from 1 on.
PIN = 0


class Holders(Protocol):
    """What is kept of a tier's holders."""

    def change(self, blocks: Iterable[int], by: int, holder: int, /) -> None:
        """Add a holder of each block, or take one away. While tables are being copied, a block may have less than 0."""


H = TypeVar("H", bound=Holders)


class TableFollower(Generic[H]):
    """The tables and pins of a pool as its Steps have made them, from the end of `copying` on."""

    def __init__(self, state: PoolState, device: H, host: H) -> None:
        """Begin without any. It has to receive every Step from now on."""
        self.changes = 0  # answers that were received
        self.resets = 0  # of the prefix cache, among those that were followed
        self._state = state
        self._device = device
        self._host = host
        self._tables: dict[int, tuple[H, list[int]]] = {}
        self._pins: dict[str, list[int]] = {}
        self._waiting: list[AppliedStep] = []

    def on_step(self, applied: AppliedStep) -> None:
        """Receive a Step that was applied. Keeps its answer for a while, which must not change any more."""
        if applied.effects or applied.result.tables:
            self.changes += 1
            self._waiting.append(applied)
            if len(self._waiting) >= _WAITING_ANSWERS:
                self.catch_up()

    def of(self, sequence: int) -> tuple[H, list[int]]:
        """Return a sequence's table, and the holders of the tier that it is in; an empty one if there is none."""
        return self._tables.get(sequence, (self._device, []))

    def catch_up(self) -> None:
        """Make the changes that were received."""
        waiting, self._waiting = self._waiting, []
        for applied in waiting:
            self.follow(applied)

    def copying(self) -> Iterator[None]:
        """Copy all tables and pins that are not known yet, and report them to their holders, a slice at a time."""
        yield from self._waiting_for_a_step()
        self.catch_up()
        copied = 0
        for number in list(self._state.sequences):
            yield from self._waiting_for_a_step()
            sequence = self._state.sequences.get(number)
            if sequence is not None and number not in self._tables:
                holders = self._host if sequence.swapped else self._device
                self._tables[number] = (holders, list(sequence.table))
                copied = yield from self._reporting(holders, list(sequence.table), number, copied)
        for pin in list(self._state.pins):
            yield from self._waiting_for_a_step()
            if pin in self._state.pins and pin not in self._pins:
                self._pins[pin] = list(self._state.pins[pin])
                copied = yield from self._reporting(self._device, list(self._state.pins[pin]), PIN, copied)
        yield
        self.catch_up()

    def _waiting_for_a_step(self) -> Iterator[None]:
        """Let a Step that is half applied come to its end: its answer says how tables were before it."""
        while self._state.stepping:
            yield
            self.catch_up()

    def _reporting(self, holders: H, table: list[int], holder: int, done: int) -> Generator[None, None, int]:
        """Report a copied table, pausing whenever a slice is full; return how full the last one is."""
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
        """Change the known tables as an answer says. Its tables are those of forks, swaps, extends and allocates."""
        tables = iter(applied.result.tables)
        for effect in map(effect_of, applied.effects):
            match effect:
                case Forked():
                    self._change_table(next(tables))
                    self._change_table(next(tables))
                case Freed():
                    self._forget(effect.sequence)
                case SwappedOut():
                    self._move(next(tables), self._host)
                case SwappedIn():
                    self._move(next(tables), self._device)
                case PinsChanged():
                    self._change_pins(effect.change, effect.blocks)
        for change in tables:
            self._change_table(change)

    def _change_table(self, change: TableChange) -> None:
        if not change.first_index and change.sequence not in self._tables:
            self._tables[change.sequence] = (self._device, [])
        if change.sequence in self._tables:
            holders, table = self._tables[change.sequence]
            holders.change(table[change.first_index :], -1, change.sequence)
            table[change.first_index :] = change.block_ids
            holders.change(change.block_ids, 1, change.sequence)

    def _move(self, change: TableChange, holders: H) -> None:
        self._forget(change.sequence)
        self._tables[change.sequence] = (holders, list(change.block_ids))
        holders.change(change.block_ids, 1, change.sequence)

    def _forget(self, sequence: int) -> None:
        if sequence in self._tables:
            holders, table = self._tables.pop(sequence)
            holders.change(table, -1, sequence)

    def _change_pins(self, change: PinChange, blocks: Iterable[int]) -> None:
        match change:
            case Pin(pin_id):
                # One that was copied between two slices of its Step is there already, as tables may be.
                self._device.change(self._pins.get(pin_id, ()), -1, PIN)
                self._pins[pin_id] = list(blocks)
                self._device.change(blocks, 1, PIN)
            case Unpin(pin_id) if pin_id in self._pins:
                self._device.change(self._pins.pop(pin_id), -1, PIN)
            case Reset():
                self.resets += 1
