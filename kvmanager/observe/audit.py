"""The audit: checks the invariants of a pool in slices, while block steps are applied between the slices.

Each block's reference count must equal its number of holders in the tables and pins. Searching all tables for the
holders of a block would take time by the size of the pool. So each audit keeps its own copies of the tables (see
`table_follower`), and from them the number of holders of each block:

* It copies the pool's tables and pins, some in each slice.
* It receives the result of every block step. Results contain the changes of tables. A change of a copied table is
  applied to the copy; a change of a table that is not copied yet is part of the later copy. A new table is copied from
  the result.
* Before it checks anything, a slice applies all received changes. Block steps and slices run in one thread, so at this
  moment the copies and the pool have the same state. Once all tables are copied, the numbers of holders are exact: any
  difference is a fault of the records, not a race.
* Nothing else is carried from slice to slice, with one exception: the index cannot be iterated while it changes, so its
  size is only compared after a sweep during which no block changed.

A slice takes time by its length and by the changes of the block steps since the last one. Each slice compares the sum
of the block counts. Only if the sum is wrong is the whole free list searched for the fault, which takes time by the
size of the pool, at most once per audit.

The audit repairs what it can: a faulty block is withheld, its reference count is set to its number of holders, and
wrong sums are corrected. A faulty block is never handed out again.

Two faults that hide each other (one free block lost, another one queued twice) are detected when the second block is
handed out twice.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvmanager.applied import AppliedStep
from kvmanager.observe.table_follower import TableFollower
from kvmanager.pool_state import COMMON_FIELDS, PoolState, SequenceTable
from kvmanager.tier.fault import BlockFault
from kvmanager.tier.tier import Tier

# Blocks, or table entries, that are checked without a pause: about a third of a millisecond.
_SLICE = 300
# Table entries that are compared in the time of one block.
_ENTRIES_PER_BLOCK = 64


class Violation(NamedTuple):
    """A violated invariant of a pool.

    `block` is in the `host` or device tier of a kind of blocks; 0 if it concerns no single block.
    """

    block: int
    host: bool
    message: str
    kind: int = 0


class _Holders:
    """The number of holders of each block of a tier, according to the audit's copies of the tables."""

    def __init__(self, tier: Tier, *, host: bool) -> None:
        self.tier = tier
        self.host = host
        self.held = 0  # blocks with a holder
        self.saved = 0
        self.shared = 0
        self.free_list_checked = False
        self._holders = array("i", bytes(4 * (tier.total + 1)))

    def of(self, block: int) -> int:
        return self._holders[block]

    def change(self, blocks: Iterable[int], by: int, _holder: int) -> None:
        """Add `by` holders to each block. While tables are being copied, the number may be below 0."""
        holders = self._holders
        for block in blocks:
            before = holders[block]
            after = holders[block] = before + by
            self.held += (after > 0) - (before > 0)
            self.saved += max(after - 1, 0) - max(before - 1, 0)
            self.shared += (after > 1) - (before > 1)

    def violations(self, faults: Iterable[BlockFault]) -> list[Violation]:
        """Return faults of the tier as violations."""
        name = "host: " if self.host else ""
        return [Violation(block, self.host, name + message) for block, message in faults]

    def check_sums(self) -> list[Violation]:
        """Compare the tier's sums with the sums over the tables, and correct them."""
        tier, faults = self.tier, []
        if tier.saved != self.saved:
            faults.append(BlockFault(0, f"saved is {tier.saved}, but the tables give {self.saved}"))
        if tier.shared != self.shared:
            faults.append(BlockFault(0, f"shared is {tier.shared}, but the tables give {self.shared}"))
        if faults:
            tier.set_sums(self.shared, self.saved)
        counts = tier.counts
        total = counts.free + counts.cached + counts.withheld + self.held
        if total != tier.total and not self.free_list_checked:
            self.free_list_checked = True
            message = f"free, cached, held and withheld blocks sum to {total}, but the tier has {tier.total}"
            faults += tier.free_faults() or [BlockFault(0, message)]
        return self.violations(faults)


class Audit:
    """One audit of one pool. It must receive every block step from its creation to the end of `slices`."""

    def __init__(self, state: PoolState) -> None:
        self._kinds = [_KindAudit(kind, state) for kind in state.kinds]

    def on_step(self, applied: AppliedStep) -> None:
        """Receive an applied block step. Its result is kept for a while and must not change."""
        for kind, own in zip(self._kinds, (applied, *applied.windows), strict=True):
            kind.on_step(own)

    def slices(self) -> Iterator[list[Violation]]:
        """Run the audit, kind by kind, yielding the violations that each slice found. Each is yielded once."""
        for number, kind in enumerate(self._kinds):
            for found in kind.slices():
                yield [one._replace(kind=number) for one in found] if number else found


class _KindAudit:
    """The audit of one kind of blocks of a pool, whose state of kind 0 is `main`."""

    def __init__(self, state: PoolState, main: PoolState) -> None:
        self._state = state
        self._main = main
        self._device = _Holders(state.device, host=False)
        self._host = _Holders(state.host, host=True)
        self._tables = TableFollower(state, self._device, self._host)

    def on_step(self, applied: AppliedStep) -> None:
        self._tables.on_step(applied)

    def slices(self) -> Iterator[list[Violation]]:
        for _ in self._tables.copying():
            yield []
        reported: set[Violation] = set()
        for check in (
            self._checking_sums,
            self._checking_sequences,
            lambda: self._checking_blocks(self._device),
            lambda: self._checking_blocks(self._host),
            self._checking_sums,
        ):
            for found in check():
                new = [one for one in dict.fromkeys(found) if one not in reported]
                reported.update(new)
                for part in _by_block(new):
                    self._withhold(part)
                    yield part
                    self._tables.catch_up()

    def _withhold(self, found: Sequence[Violation]) -> None:
        """Withhold the block of violations, which all concern the same block or none."""
        if not found:
            return
        block, host, *_ = found[0]
        holders = self._host if host else self._device
        if 1 <= block <= holders.tier.total:
            faulty = {block: holders.of(block)}
            self._state.withhold(*(({}, faulty) if host else (faulty, {})))

    # Checks: each slice runs right after `catch_up`.

    def _checking_sums(self) -> Iterator[list[Violation]]:
        yield [*self._device.check_sums(), *self._host.check_sums()]

    def _checking_sequences(self) -> Iterator[list[Violation]]:
        found: list[Violation] = []
        done = 0
        for sequence_id in list(self._state.sequences):
            if sequence_id in self._state.sequences:
                found += self._sequence_violations(sequence_id)
                done += 1 + len(self._state.sequences[sequence_id].table) // _ENTRIES_PER_BLOCK
            if done >= _SLICE:
                yield found
                found, done = [], 0
        yield found

    def _sequence_violations(self, sequence_id: int) -> list[Violation]:
        sequence = self._state.sequences[sequence_id]
        followed = self._tables.of(sequence_id)
        holders, table = followed.holders, followed.blocks
        found = []
        same = sequence.table == table and sequence.dropped == followed.dropped
        if not same or sequence.swapped != holders.host:
            pairs = zip(sequence.table, table, strict=False)
            block = next((one for one, other in pairs if one != other), 0)
            message = f"the table of sequence {sequence_id} differs from the results of its block steps"
            found.append(Violation(block, sequence.swapped, message))
        elif sequence.committed_blocks > sequence.dropped and self._has_other_key(sequence, holders.tier):
            block = table[sequence.committed_blocks - 1 - sequence.dropped]
            message = f"block {block} has a key that differs from the last key of sequence {sequence_id}"
            found += holders.violations([BlockFault(block, message)])
        if self._state is not self._main and self._differs(sequence):
            message = f"sequence {sequence_id} is at another boundary than in kind 0"
            found.append(Violation(0, sequence.swapped, message))
        if sequence_id not in self._state.groups.get(sequence.group, ()):
            found.append(Violation(0, sequence.swapped, f"sequence {sequence_id} is not in its group {sequence.group}"))
        return found

    def _differs(self, sequence: SequenceTable) -> bool:
        """Return whether a sequence of a window kind has other rooms or committed blocks than that of kind 0."""
        other = self._main.sequences.get(sequence.id)
        return other is None or any(getattr(other, name) != getattr(sequence, name) for name in COMMON_FIELDS)

    def _has_other_key(self, sequence: SequenceTable, tier: Tier) -> bool:
        block = sequence.table[sequence.committed_blocks - 1 - sequence.dropped]
        return tier.key(block) != sequence.last_key and not tier.marks.is_withheld_or_marked(block)

    def _checking_blocks(self, holders: _Holders) -> Iterator[list[Violation]]:
        tier, changes, keys = holders.tier, self._tables.changes, 0
        for start in range(1, tier.total + 1, _SLICE):
            faults: list[BlockFault] = []
            for block in range(start, min(start + _SLICE, tier.total + 1)):
                faults += tier.block_faults(block, holders.of(block))
                keys += tier.keys.is_first_of_key(block)
            yield [*holders.violations(faults), *holders.check_sums()]
        if changes == self._tables.changes and keys != len(tier.keys):
            for faults in tier.keys.checking():
                yield holders.violations(faults)


def _by_block(found: Iterable[Violation]) -> Iterable[list[Violation]]:
    """Return violations grouped by block; one empty list if there are none.

    Each group is a slice, because withholding a block searches the free list.
    """
    blocks: dict[tuple[int, bool], list[Violation]] = {}
    for violation in found:
        blocks.setdefault((violation.block, violation.host), []).append(violation)
    return list(blocks.values()) or [[]]
