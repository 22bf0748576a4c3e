"""The audit: checks a pool's books a slice at a time, while Steps go on between the slices.

Tables say who holds which block, counts say how many holders a block has. To compare the two for a range of blocks
means to know all their holders, and looking through all tables for them would take time by the size of the pool. So
each audit keeps tables of its own (see `table_follower`), and from them the number of holders of each block:

* It copies the pool's tables and pins, some in each slice. A table is *known* from the moment it was copied.
* It receives every Step's answer. Answers say how tables change, which is what an engine keeps its own tables by: a
  change of a known table is made in the copy, one of a table that is not known is left to the copying, which comes
  later and sees it. A whole new table makes its sequence known at once.
* Before a slice looks at anything it has made all changes that it received. Steps and slices run in one thread of
  control, each from its beginning to its end. So at that moment copies and pool are of the same Step, and once all is
  copied, the number of holders is exact: what differs is a fault of the books, never a matter of time.
* Nothing else is carried from slice to slice, with one exception: the index cannot be walked while it changes, so how
  many keys it has is only compared after a sweep during which nothing happened to any block.

A slice takes time by its length and by what the Steps since the last one changed. The free blocks are counted in each
slice; only when their number is wrong are they walked through at once, to say which: that takes time by the size of
the pool, once an audit.

What it finds it puts right as far as it can: a block that is to blame is withheld, with the count that the tables say,
and a sum becomes theirs. A block with a fault is never handed out again, whatever the fault was.

Two faults that hide each other (a free block lost, another one queued twice) are seen when the second one is handed
out twice.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kvmanager.applied import AppliedStep
from kvmanager.observe.table_follower import TableFollower
from kvmanager.pool_state import PoolState, SequenceTable
from kvmanager.tier.fault import BlockFault
from kvmanager.tier.tier import Tier

# Blocks, or entries of tables, that are looked at without a pause: about a third of a millisecond.
_SLICE = 300
# Entries of a table that are compared in the time of one block.
_COMPARED_TOGETHER = 64


class Violation(NamedTuple):
    """A fault of a pool's books, in words. `block` is of the device tier or of the `host`; 0: no single one."""

    block: int
    host: bool
    sentence: str


class _Holders:
    """How many table entries and pins hold each block of a tier, by the audit's own tables."""

    def __init__(self, tier: Tier, *, host: bool) -> None:
        self.tier = tier
        self.host = host
        self.held = 0  # blocks with a holder
        self.saved = 0
        self.shared = 0
        self.queues_walked = False
        self._holders = array("i", bytes(4 * (tier.total + 1)))

    def of(self, block: int) -> int:
        return self._holders[block]

    def change(self, blocks: Iterable[int], by: int, _holder: int) -> None:
        """Add a holder of each block, or take one away. While tables are being copied, a block may have less than 0."""
        holders = self._holders
        for block in blocks:
            before = holders[block]
            after = holders[block] = before + by
            self.held += (after > 0) - (before > 0)
            self.saved += max(after - 1, 0) - max(before - 1, 0)
            self.shared += (after > 1) - (before > 1)

    def violations(self, faults: Iterable[BlockFault]) -> list[Violation]:
        """Write faults of the tier as violations."""
        name = "host: " if self.host else ""
        return [Violation(block, self.host, name + sentence) for block, sentence in faults]

    def sums(self) -> list[Violation]:
        """Compare the tier's sums with the holders'."""
        tier, faults = self.tier, []
        if tier.saved != self.saved:
            faults.append(BlockFault(0, f"saved is {tier.saved}, the tables say {self.saved}"))
        if tier.shared != self.shared:
            faults.append(BlockFault(0, f"shared is {tier.shared}, the tables say {self.shared}"))
        if faults:
            tier.correct_sums(self.shared, self.saved)
        counts = tier.counts
        places = counts.free + counts.cached + counts.withheld + self.held
        if places != tier.total and not self.queues_walked:
            self.queues_walked = True
            sentence = f"free, cached, held and withheld blocks sum to {places}, there are {tier.total}"
            faults += tier.free_faults() or [BlockFault(0, sentence)]
        return self.violations(faults)


class Audit:
    """One audit of one pool, from its making to the end of `slices`. It has to receive every Step in this time."""

    def __init__(self, state: PoolState) -> None:
        self._state = state
        self._device = _Holders(state.device, host=False)
        self._host = _Holders(state.host, host=True)
        self._tables = TableFollower(state, self._device, self._host)

    def on_step(self, applied: AppliedStep) -> None:
        """Receive a Step that was applied. Keeps its answer for a while, which must not change any more."""
        self._tables.on_step(applied)

    def slices(self) -> Iterator[list[Violation]]:
        """Do the audit, pausing after each slice with what it found."""
        for _ in self._tables.copying():
            yield []
        told: set[Violation] = set()
        for check in (
            self._sums,
            self._checking_sequences,
            lambda: self._checking_blocks(self._device),
            lambda: self._checking_blocks(self._host),
            self._sums,
        ):
            for found in check():
                new = [one for one in dict.fromkeys(found) if one not in told]
                told.update(new)
                for part in _by_block(new):
                    self._take_out(part)
                    yield part
                    self._tables.catch_up()

    def _take_out(self, found: Sequence[Violation]) -> None:
        """Withhold the block that violations name, if they name one."""
        if not found:
            return
        block, host, _ = found[0]
        holders = self._host if host else self._device
        if 1 <= block <= holders.tier.total:
            blame = {block: holders.of(block)}
            self._state.withhold(*(({}, blame) if host else (blame, {})))

    # Checks. Each looks at the pool right after it caught up.

    def _sums(self) -> Iterator[list[Violation]]:
        yield [*self._device.sums(), *self._host.sums()]

    def _checking_sequences(self) -> Iterator[list[Violation]]:
        found: list[Violation] = []
        done = 0
        for number in list(self._state.sequences):
            if number in self._state.sequences:
                found += self._sequence_violations(number)
                done += 1 + len(self._state.sequences[number].table) // _COMPARED_TOGETHER
            if done >= _SLICE:
                yield found
                found, done = [], 0
        yield found

    def _sequence_violations(self, number: int) -> list[Violation]:
        sequence = self._state.sequences[number]
        holders, table = self._tables.of(number)
        found = []
        if sequence.table != table or sequence.swapped != holders.host:
            pairs = zip(sequence.table, table, strict=False)
            block = next((one for one, other in pairs if one != other), 0)
            sentence = f"sequence {number} has another table than its Steps have made"
            found.append(Violation(block, sequence.swapped, sentence))
        elif sequence.committed and self._has_other_key(sequence, holders.tier):
            block = table[sequence.committed - 1]
            sentence = f"block {block} has not the key that sequence {number} has it under"
            found += holders.violations([BlockFault(block, sentence)])
        if number not in self._state.groups.get(sequence.group, ()):
            found.append(Violation(0, sequence.swapped, f"sequence {number} is not in its group {sequence.group}"))
        return found

    def _has_other_key(self, sequence: SequenceTable, tier: Tier) -> bool:
        block = sequence.table[sequence.committed - 1]
        return tier.key(block) != sequence.key and not tier.marks.is_out(block)

    def _checking_blocks(self, holders: _Holders) -> Iterator[list[Violation]]:
        tier, changes, keys = holders.tier, self._tables.changes, 0
        for start in range(1, tier.total + 1, _SLICE):
            faults: list[BlockFault] = []
            for block in range(start, min(start + _SLICE, tier.total + 1)):
                faults += tier.block_faults(block, holders.of(block))
                keys += tier.keys.answers(block)
            yield [*holders.violations(faults), *holders.sums()]
        if changes == self._tables.changes and keys != len(tier.keys):
            for faults in tier.keys.checking():
                yield holders.violations(faults)


def _by_block(found: Iterable[Violation]) -> Iterable[list[Violation]]:
    """Return violations by the block that they name; one empty list where there are none.

    To withhold a block means to look for it among all free ones, so others get their turn after each.
    """
    blocks: dict[tuple[int, bool], list[Violation]] = {}
    for violation in found:
        blocks.setdefault((violation.block, violation.host), []).append(violation)
    return list(blocks.values()) or [[]]
