"""Reports: all there is to know of a pool, as its engine tells it when it attaches again.

The same report always rebuilds the same pool: ids, counts, keys and the order in which blocks will be handed out.
Writing one and adopting one take time by the size of the pool, so both are generators that pause between slices.
"""

from collections.abc import Generator
from dataclasses import dataclass, field

from kvmanager.pool import Pool
from kvmanager.pool_state import SequenceTable
from kvmanager.tier.key_index import NO_KEY
from kvmanager.tier.tier import Tier

# Entries that are looked at without a pause: well below a millisecond.
_SLICE = 1000
_DISMANTLED_SEQUENCES = 8


@dataclass
class SequenceReport:
    """A sequence: its table, in the host tier if it is swapped, and what its next block's key will be chained to.

    `resets` is how often the pool had been reset when the sequence began.
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


@dataclass
class TierReport:
    """The blocks of a tier, but for its tables.

    `keyed` are blocks with their keys in sealing order, `unindexed` held blocks that no key leads to, with their keys
    (NO_KEY: none yet), `release_order` all blocks at count 0 in the order in which they will be handed out, `withheld`
    those that an audit took out of circulation, or takes out once nobody holds them.
    """

    # Dicts of plain values are the one form that a garbage collector does not walk through again and again.
    keyed: dict[int, bytes] = field(default_factory=dict)
    unindexed: dict[int, bytes] = field(default_factory=dict)
    release_order: list[int] = field(default_factory=list)
    withheld: list[int] = field(default_factory=list)


@dataclass
class PoolReport:
    """A pool. Without sequences, pins and blocks it means: this pool holds nothing and begins anew."""

    sequences: list[SequenceReport] = field(default_factory=list)
    pins: dict[str, list[int]] = field(default_factory=dict)
    device: TierReport = field(default_factory=TierReport)
    host: TierReport = field(default_factory=TierReport)
    resets: int = 0
    last_step: int = 0

    def dismantle(self) -> Generator[None, None, None]:
        """Give the memory of a report that nobody reads any more back, with pauses: all at once takes long."""
        for tier in (self.device, self.host):
            for keys in (tier.keyed, tier.unindexed):
                while keys:
                    for _ in range(min(len(keys), _SLICE)):
                        keys.popitem()
                    yield
        while self.sequences:
            del self.sequences[-_DISMANTLED_SEQUENCES:]
            yield

    @property
    def empty(self) -> bool:
        """Whether it says nothing of any block."""
        return self == PoolReport(resets=self.resets, last_step=self.last_step)


def report_of(pool: Pool) -> PoolReport:
    """Describe a pool. Adopting the answer gives an equal pool."""
    state = pool.state
    return PoolReport(
        sequences=[_sequence_report(sequence) for sequence in state.sequences.values()],
        pins={pin: list(blocks) for pin, blocks in state.pins.items()},
        device=_tier_report(state.device),
        host=_tier_report(state.host),
        resets=state.resets,
        last_step=pool.last_step,
    )


def _sequence_report(sequence: SequenceTable) -> SequenceReport:
    return SequenceReport(
        sequence=sequence.id,
        group=sequence.group,
        request_id=sequence.request_id,
        salt=sequence.salt,
        resets=sequence.resets,
        block_ids=list(sequence.table),
        prompt_tokens=sequence.prompt,
        room_tokens=sequence.room,
        computed_tokens=sequence.computed,
        committed_blocks=sequence.committed,
        swapped=sequence.swapped,
    )


def _tier_report(tier: Tier) -> TierReport:
    unindexed = {block: tier.key(block) or NO_KEY for block in tier.marks.unindexed()}
    withheld = [*tier.marks.withheld(), *tier.marks.withheld_on_release()]
    return TierReport(tier.keys.sealing_order(), unindexed, tier.eviction_order(), withheld)
