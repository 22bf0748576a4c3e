"""A block manager that reserves one contiguous slab for each sequence, and shares nothing: Orca and FasterTransformer.

It speaks the protocol of the engine, so the scheduler is the product's. A slab is granted whole, so that a sequence
never asks for more, is never preempted, and never waits once it runs. Requests wait in order: the first that has no
room holds back those behind it.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from bench.loads.memory import Lengths
from bench.papers.baselines.buddy import BuddyAllocator
from bench.papers.baselines.slabs import Reservation, Slab
from blocks import (
    Allocate,
    Copy,
    Extend,
    Fork,
    Refusal,
    Step,
    StepItem,
    StepRefusal,
    StepResult,
    TableChange,
    blocks_for,
)


class Demand(NamedTuple):
    """The true lengths of a request's sequences, and their number."""

    lengths: Lengths
    sequences: int = 1


class MemoryShares(NamedTuple):
    """Shares of all slots, as in Figure 2 of the paper.

    `tokens` are filled, `reserved` will be, `internal` ones never will; `external` are all slots that no sequence has
    reserved, whether free or lost to the rounding of slabs.
    """

    tokens: float
    reserved: float
    internal: float
    external: float


@dataclass(eq=False)
class _Reserved:
    """The slabs of a group: those of its sequences, and spare ones for sequences that are not forked yet.

    `parents` has the sequences whose K and V must be copied, with their lengths in blocks.
    """

    group: int
    demand: Demand
    spare: list[Slab]
    held: dict[int, Slab] = field(default_factory=dict)
    granted: dict[int, int] = field(default_factory=dict)  # blocks in the engine's table, by sequence
    parents: dict[int, tuple[int, int]] = field(default_factory=dict)


class ContiguousBlocks:
    """A `blocks.BlockManager` over a buddy allocator.

    With `static_batches`, requests are admitted only when no request is live, as by FasterTransformer; `batches` has
    the ids of each batch.
    """

    def __init__(
        self,
        blocks: int,
        block_size: int,
        reservation: Reservation,
        demands: Mapping[str, Demand],
        *,
        static_batches: bool = False,
    ) -> None:
        """Start with `blocks` free blocks. `demands` has the true lengths by request id."""
        self.ready = True
        self.batches: list[list[str]] = []
        self._buddies = BuddyAllocator(blocks)
        self._blocks = blocks
        self._block_size = block_size
        self._reservation = reservation
        self._demands = demands
        self._static_batches = static_batches
        self._groups: dict[int, _Reserved] = {}
        self._group_of: dict[int, _Reserved] = {}  # by sequence
        self._answers: deque[StepResult] = deque()

    def send(self, step: Step) -> None:
        """Apply a Step at once."""
        changes = [change for fork in step.forks for change in self._fork(fork)]
        for free in step.frees:
            self._free(free.sequence)
        copies: list[Copy] = []
        for extend in step.extends:
            changes += self._extend(extend, copies)
        refusals = []
        batch: list[str] = []
        admits = not (self._static_batches and self._groups)
        for position, item in enumerate(step.allocates):
            change = self._allocate(item) if admits else None
            if change is None:
                admits = False  # later requests do not overtake
                refusals.append(Refusal(StepItem.ALLOCATE, position, StepRefusal.OUT_OF_BLOCKS, "no slab is free"))
            else:
                changes.append(change)
                batch.append(item.request_id)
        if batch:
            self.batches.append(batch)
        self._answers.append(StepResult(step.step, tuple(refusals), tuple(changes), tuple(copies), self._available()))

    def receive(self) -> StepResult | None:
        """Return the next result."""
        return self._answers.popleft() if self._answers else None

    def find_unfit(self) -> str | None:
        """Return the id of a request that even an empty memory cannot hold, None if there is none."""
        if not self._demands:
            return None
        largest = max(self._demands, key=lambda name: self._reservation(self._demands[name].lengths))
        demand, empty = self._demands[largest], BuddyAllocator(self._blocks)
        size = self._table_blocks(self._reservation(demand.lengths))
        return None if all(empty.allocate(size) for _ in range(demand.sequences)) else largest

    def shares(self, computed: Mapping[int, int]) -> MemoryShares:
        """Return the breakdown of all slots; `computed` has the tokens with K and V of each sequence."""
        tokens = reserved = internal = 0
        for sequence, group in self._group_of.items():
            filled = computed.get(sequence, 0)
            tokens += filled
            reserved += sum(group.demand.lengths) - filled
            internal += self._reserved_tokens(group) - sum(group.demand.lengths)
        slots = self._blocks * self._block_size
        external = slots - tokens - reserved - internal
        return MemoryShares(tokens / slots, reserved / slots, internal / slots, external / slots)

    # Verbs.

    def _allocate(self, item: Allocate) -> TableChange | None:
        demand = self._demands[item.request_id]
        size = self._table_blocks(self._reservation(demand.lengths))
        slabs: list[Slab] = []
        for _ in range(demand.sequences):
            slab = self._buddies.allocate(size)
            if slab is None:
                for one in slabs:
                    self._buddies.release(one)
                return None
            slabs.append(slab)
        group = _Reserved(item.group, demand, slabs)
        self._groups[item.group] = self._group_of[item.sequence] = group
        return self._grant(group, item.sequence, 0)

    def _fork(self, fork: Fork) -> Iterator[TableChange]:
        """Shorten the parent's table; the child gets its slab when it asks for room."""
        group = self._group_of[fork.parent]
        kept = self._table_blocks(fork.length)
        group.granted[fork.parent] = kept
        group.granted[fork.child] = 0
        group.parents[fork.child] = (fork.parent, kept)
        self._group_of[fork.child] = group
        for sequence in (fork.parent, fork.child):
            yield TableChange(sequence, kept, (), fork.length)

    def _extend(self, extend: Extend, copies: list[Copy]) -> Iterator[TableChange]:
        """Grant the whole slab to each sequence, and copy the K and V of forked ones."""
        group = self._groups[extend.group]
        for sequence, _ in extend.rooms:
            change = self._grant(group, sequence, group.granted[sequence])
            if sequence in group.parents:
                parent, kept = group.parents.pop(sequence)
                source, own = group.held[parent].start, group.held[sequence].start
                copies += (Copy(source + block + 1, own + block + 1) for block in range(kept))
            yield change

    def _free(self, sequence: int) -> None:
        group = self._group_of.pop(sequence)
        group.granted.pop(sequence)
        group.parents.pop(sequence, None)
        if slab := group.held.pop(sequence, None):
            group.spare.append(slab)
        if not group.granted:
            del self._groups[group.group]
            for one in group.spare:
                self._buddies.release(one)

    def _grant(self, group: _Reserved, sequence: int, first: int) -> TableChange:
        if sequence not in group.held:
            group.held[sequence] = group.spare.pop()
        size = self._table_blocks(self._reserved_tokens(group))
        start = group.held[sequence].start + 1
        group.granted[sequence] = size
        return TableChange(sequence, first, tuple(range(start + first, start + size)), size * self._block_size)

    # Sizes.

    def _table_blocks(self, tokens: int) -> int:
        return blocks_for(tokens, self._block_size)

    def _reserved_tokens(self, group: _Reserved) -> int:
        return self._reservation(group.demand.lengths)

    def _available(self) -> int:
        """Blocks that are in no table of the engine. Slabs reserved for sequences to be forked count as available."""
        return self._blocks - sum(sum(group.granted.values()) for group in self._groups.values())
