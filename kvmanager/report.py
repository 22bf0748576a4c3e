"""Reports: the complete state of a pool, which its engine sends when it attaches again.

The same report always rebuilds the same pool: ids, reference counts, keys and eviction order. Writing and adopting a
report take time by the size of the pool, so both are done in slices.
"""

from collections.abc import Collection, Generator
from dataclasses import dataclass, field
from itertools import chain

from kvmanager.parts import complete, parts_of
from kvmanager.pool import Pool
from kvmanager.pool_state import PoolState, SequenceTable
from kvmanager.tier.key_index import NO_KEY
from kvmanager.tier.tier import Tier

# Entries, and sequences, that are freed without a pause: well below a millisecond.
_SLICE = 1000
_SLICE_SEQUENCES = 8


@dataclass
class SequenceReport:
    """A sequence with its table, which has host blocks if it is swapped.

    `resets` counts the resets of the pool before the sequence began: together with the committed blocks, it determines
    the next key.
    """

    sequence: int
    group: int
    request_id: str
    salt: bytes
    resets: int
    block_ids: list[int]
    room_tokens: int
    computed_tokens: int
    committed_blocks: int
    swapped: bool = False
    prompt_tokens: int = 0
    # Of a window kind.
    dropped: int = 0
    trimmed_to: int = 0
    retained: tuple[int, ...] = ()


@dataclass
class TierReport:
    """The blocks of a tier, without its tables.

    `keyed` maps indexed blocks to their keys, in sealing order. `unindexed` maps held blocks that are kept out of the
    index to their keys, NO_KEY if they have none yet. `release_order` lists the free and cached blocks in eviction
    order. `withheld` lists the withheld blocks, and the held ones that will be on release. `outlived` lists the keyed
    blocks whose contents an earlier process of the engine computed.
    """

    # Dicts of plain values, because the garbage collector does not traverse them.
    keyed: dict[int, bytes] = field(default_factory=dict)
    unindexed: dict[int, bytes] = field(default_factory=dict)
    release_order: list[int] = field(default_factory=list)
    withheld: list[int] = field(default_factory=list)
    outlived: list[int] = field(default_factory=list)


@dataclass
class PoolReport:
    """A pool. Without sequences, pins and blocks, it describes an empty pool with all blocks free.

    `windows` has a report for each window kind: its tiers, its tables of the same sequences, and its blocks of pins.
    """

    sequences: list[SequenceReport] = field(default_factory=list)
    pins: dict[str, list[int]] = field(default_factory=dict)
    device: TierReport = field(default_factory=TierReport)
    host: TierReport = field(default_factory=TierReport)
    resets: int = 0
    last_step: int = 0
    windows: "list[PoolReport]" = field(default_factory=list)

    @property
    def withheld(self) -> "list[Collection[int]]":
        """The withheld device blocks of each kind, kind 0 first."""
        return [one.device.withheld for one in (self, *self.windows)]

    def dismantle(self) -> Generator[None, None, None]:
        """Free the memory of a report that is no longer used, in slices, because freeing all at once takes long."""
        for tier in (self.device, self.host):
            for keys in (tier.keyed, tier.unindexed):
                while keys:
                    for _ in range(min(len(keys), _SLICE)):
                        keys.popitem()
                    yield
        while self.sequences:
            del self.sequences[-_SLICE_SEQUENCES:]
            yield
        for window in self.windows:
            yield from window.dismantle()

    @property
    def empty(self) -> bool:
        """Whether the report contains no blocks."""
        return self == PoolReport(resets=self.resets, last_step=self.last_step)


def report_of(pool: Pool) -> PoolReport:
    """Return a report of a pool. Adopting it gives an equal pool."""
    return complete(reporting(pool))


def reporting(pool: Pool) -> Generator[None, None, PoolReport]:
    """Write a report in slices; the generator's return value is the report. The pool must not change before the end."""
    report = yield from _reporting_kind(pool.state, pool.last_step)
    for window in pool.windows:
        report.windows.append((yield from _reporting_kind(window, pool.last_step)))
    return report


def _reporting_kind(state: PoolState, last_step: int) -> Generator[None, None, PoolReport]:
    report = PoolReport(resets=state.resets, last_step=last_step)
    for sequences in parts_of(state.sequences.values(), _SLICE_SEQUENCES):
        report.sequences += map(_sequence_report, sequences)
        yield
    for pins in parts_of(state.pins.items(), _SLICE_SEQUENCES):
        report.pins.update((pin, list(blocks)) for pin, blocks in pins)
        yield
    yield from _reporting_tier(report.device, state.device)
    yield from _reporting_tier(report.host, state.host)
    return report


def _sequence_report(sequence: SequenceTable) -> SequenceReport:
    return SequenceReport(
        sequence=sequence.id,
        group=sequence.group,
        request_id=sequence.request_id,
        salt=sequence.salt,
        resets=sequence.resets,
        block_ids=list(sequence.table),
        prompt_tokens=sequence.prompt_tokens,
        dropped=sequence.dropped,
        trimmed_to=sequence.trimmed_to,
        retained=sequence.retained,
        room_tokens=sequence.room_tokens,
        computed_tokens=sequence.computed_tokens,
        committed_blocks=sequence.committed_blocks,
        swapped=sequence.swapped,
    )


def _reporting_tier(report: TierReport, tier: Tier) -> Generator[None, None, None]:
    for seals in parts_of(tier.keys.entries(), _SLICE):
        report.keyed.update((block, key) for key, block in seals)
        yield
    for blocks in parts_of(tier.marks.unindexed(), _SLICE):
        report.unindexed.update((block, tier.key(block) or NO_KEY) for block in blocks)
        yield
    for blocks in parts_of(chain(tier.free.in_order(), tier.cached), _SLICE):
        report.release_order += blocks
        yield
    report.withheld = [*tier.marks.withheld(), *tier.marks.withheld_on_release()]
    for blocks in parts_of(sorted(tier.keys.outlived), _SLICE):
        report.outlived += blocks
        yield
