"""A pool: the block space of one engine.

It changes only by `apply`, which applies each item of a block step completely or not at all. The same block steps
always give the same block ids.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

from blocks import Refusal, Step, StepItem, StepRefusal
from kvmanager import limits
from kvmanager.applied import AppliedStep, Outcome
from kvmanager.errors import (
    IdInUse,
    InvalidItem,
    ItemRefused,
    OutOfBlocks,
    PinTooLarge,
    StepOutOfOrder,
    UnknownPin,
    UnknownSequence,
)
from kvmanager.observe.slots import SlotCounter, Slots
from kvmanager.parts import Parts, complete
from kvmanager.pool_spec import PoolSpec
from kvmanager.pool_state import PoolState, SequenceTable
from kvmanager.tier.tier import Tier
from kvmanager.verbs import in_kinds
from kvmanager.verbs.admission import allocate
from kvmanager.verbs.condemning import condemn
from kvmanager.verbs.growth import extend
from kvmanager.verbs.lifecycle import commit, fork, free
from kvmanager.verbs.pinning import change_pins
from kvmanager.verbs.swapping import swap_in, swap_out
from kvmanager.verbs.trimming import trim

_SLICE_SEQUENCES = 256  # whose slots are counted without a pause: some 0.1 ms
_SLICE_ENTRIES = 8192  # table entries that are checked or freed without a pause
_SLICE_IDS = 4096  # sequence ids that are compared without a pause
_SLICE_LENGTHS = 4096  # lengths that are set without a pause: some 0.3 ms
# In units of work, each well below a microsecond.
_UNLIMITED = 1 << 62
_REFUSAL_WORK = 8
_TOKENS_PER_UNIT = 16
# Of an item that adds a sequence, beside its blocks and tokens.
_SEQUENCE_WORK = 8

# Verbs whose effects have no other bound than MAX_STEP_BLOCKS.
_GRANTS = (StepItem.SWAP_OUT, StepItem.SWAP_IN, StepItem.EXTEND, StepItem.ALLOCATE)

_Verb = Callable[[PoolState, Any, Outcome], Parts | None]
# In the order of application.
_ITEMS = (
    StepItem.CONDEMN,
    StepItem.COMMIT,
    StepItem.TRIM,
    StepItem.PIN,
    StepItem.FORK,
    StepItem.FREE,
    StepItem.SWAP_OUT,
    StepItem.SWAP_IN,
    StepItem.EXTEND,
    StepItem.ALLOCATE,
)
_VERBS: tuple[_Verb, ...] = (condemn, commit, trim, change_pins, fork, free, swap_out, swap_in, extend, allocate)
_IN_KINDS: tuple[_Verb, ...] = (
    condemn,
    in_kinds.commit,
    trim,
    in_kinds.change_pins,
    in_kinds.fork,
    in_kinds.free,
    in_kinds.swap_out,
    in_kinds.swap_in,
    in_kinds.extend,
    in_kinds.allocate,
)

_REFUSALS: dict[type[ItemRefused], StepRefusal] = {
    OutOfBlocks: StepRefusal.OUT_OF_BLOCKS,
    UnknownSequence: StepRefusal.UNKNOWN,
    UnknownPin: StepRefusal.UNKNOWN,
    IdInUse: StepRefusal.ALREADY_EXISTS,
    InvalidItem: StepRefusal.INVALID,
    PinTooLarge: StepRefusal.PIN_TOO_LARGE,
}


class Pool:
    """Block tables of one engine's sequences over a device tier and a host tier."""

    def __init__(self, spec: PoolSpec, state: PoolState | None = None) -> None:
        """Start with every block free and no sequences, or with `state`."""
        self.state = state or PoolState.empty(spec)
        self.last_step = 0
        self._pins_counted: list[list[int]] = []
        self._pinned_blocks = 0

    @property
    def spec(self) -> PoolSpec:
        """The properties that the engine registered."""
        return self.state.spec

    @property
    def device(self) -> Tier:
        """The blocks in device memory."""
        return self.state.device

    @property
    def host(self) -> Tier:
        """The blocks in host memory."""
        return self.state.host

    @property
    def windows(self) -> tuple[PoolState, ...]:
        """The states of the window kinds."""
        return self.state.windows

    @property
    def sequences(self) -> dict[int, SequenceTable]:
        """The live sequences by id."""
        return self.state.sequences

    @property
    def groups(self) -> dict[int, dict[int, None]]:
        """The sequence ids of each live group."""
        return self.state.groups

    def apply(self, step: Step) -> AppliedStep:
        """Apply a block step, item by item. Raises StepOutOfOrder, changing nothing, unless its number is highest."""
        return complete(self.applying(step, _UNLIMITED))

    def applying(self, step: Step, budget: int) -> Generator[None, None, AppliedStep]:  # noqa: C901  (one frame, for speed)
        """Apply a block step in slices; the generator's return value is the result. Raises StepOutOfOrder like `apply`.

        A slice ends after the item, or the part of an item, that completes `budget` units of work. A unit is a block,
        16 tokens hashed, or an item; an item that adds a sequence counts as 8. At every pause the conservation law
        holds. Nothing else may change the pool before the last slice.
        """
        if step.step <= self.last_step:
            raise StepOutOfOrder(f"step must be higher than {self.last_step}, not {step.step}")
        self.last_step = step.step
        state = self.state
        outcome = Outcome(windows=[Outcome() for _ in state.windows])
        effects, refusals = outcome.effects, outcome.refusals
        withheld = [kind.take_withheld() for kind in state.kinds]
        work = moved = 0
        # Inlined, with no call except the verb's, because every decoding step of the engine runs this loop.
        for kind, items, verb in _verbs(step, in_kinds=bool(state.windows)):
            hashes, grants = kind is StepItem.ALLOCATE, kind in _GRANTS
            own_work = _SEQUENCE_WORK if hashes or kind is StepItem.FORK else 1
            for position, item in enumerate(items):
                seen = len(effects)
                try:
                    if grants and moved >= limits.MAX_STEP_BLOCKS:
                        raise OutOfBlocks(f"the block step has already changed {moved} blocks; send this in the next")
                    remaining = verb(state, item, outcome)
                    if remaining is not None:
                        work = yield from _in_slices(remaining, work, budget)
                    blocks = len(effects[seen][3]) * (len(effects) - seen) if len(effects) > seen else 0
                    moved += blocks
                    work += own_work + blocks if remaining is None else own_work
                except ItemRefused as refused:
                    refusals.append(Refusal(kind, position, _REFUSALS[type(refused)], str(refused)))
                    work += _REFUSAL_WORK
                if hashes:
                    work += len(item.token_ids) // _TOKENS_PER_UNIT
                if work >= budget:
                    work = 0
                    yield
        for start in range(0, len(step.lengths), _SLICE_LENGTHS):
            if start:
                yield
            self._set_lengths(step.lengths, start, outcome)
        for one in state.kinds:
            work = yield from _in_slices(one.end_step(), work, budget)
        windows = tuple(
            [
                one.applied(step.step, kind.device.counts, kind.host.counts, blocks)
                for one, kind, blocks in zip(outcome.windows, state.windows, withheld[1:], strict=True)
            ]
        )
        return outcome.applied(step.step, self.device.counts, self.host.counts, withheld[0], windows)

    def _set_lengths(self, lengths: Sequence[tuple[int, int]], start: int, outcome: Outcome) -> None:
        # A plain loop, because every block step has an entry for every running sequence, and nearly all entries are
        # valid.
        part = lengths[start : start + _SLICE_LENGTHS] if len(lengths) > _SLICE_LENGTHS else lengths
        sequences = self.state.sequences
        try:
            for sequence_id, tokens in part:
                sequence = sequences[sequence_id]
                if tokens > sequence.room_tokens or tokens < 0:
                    break
                sequence.computed_tokens = tokens
            else:
                return
        except KeyError:
            pass
        self._set_lengths_or_refuse(part, start, outcome)

    def _set_lengths_or_refuse(self, lengths: Sequence[tuple[int, int]], start: int, outcome: Outcome) -> None:
        for position, (sequence_id, tokens) in enumerate(lengths, start):
            sequence = self.state.sequences.get(sequence_id)
            if sequence is None:
                detail = f"sequence {sequence_id} does not exist"
                outcome.refusals.append(Refusal(StepItem.LENGTH, position, StepRefusal.UNKNOWN, detail))
            elif not 0 <= tokens <= sequence.room_tokens:
                detail = f"tokens must be between 0 and {sequence.room_tokens}, the room of the sequence, not {tokens}"
                outcome.refusals.append(Refusal(StepItem.LENGTH, position, StepRefusal.INVALID, detail))
            else:
                sequence.computed_tokens = tokens

    def listing_sequences(self, after: int, count: int) -> Generator[None, None, list[SequenceTable]]:
        """List, in slices, the `count` sequences with the lowest ids above `after`; the return value is the list.

        Sequences that begin or end between the slices may or may not be listed.
        """
        lowest: list[int] = []
        ids = list(self.sequences)
        for start in range(0, len(ids), _SLICE_IDS):
            if start:
                yield
            later = [sequence_id for sequence_id in ids[start : start + _SLICE_IDS] if sequence_id > after]
            lowest = sorted([*lowest, *later])[:count]
        return [self.sequences[sequence_id] for sequence_id in lowest if sequence_id in self.sequences]

    def is_of(self, group: int, request_id: str) -> bool:
        """Return whether a group is live and belongs to a request."""
        first = next(iter(self.groups.get(group, ())), None)
        return first is not None and self.sequences[first].request_id == request_id

    def finding_group(self, request_id: str) -> Generator[None, None, int | None]:
        """Find, in slices, the latest live group of a request; the return value is None if there is none."""
        for number, group in enumerate(reversed(list(self.groups)), 1):
            if self.is_of(group, request_id):
                return group
            if not number % _SLICE_IDS:
                yield
        return None

    def computed_tokens(self) -> int:
        """Return the number of computed tokens in held device blocks; tokens of shared blocks count once."""
        return self.slots().tokens

    def slots(self) -> Slots:
        """Return the breakdown of the slots in held device blocks. Takes time by the number of sequences."""
        return complete(self.count_slots())

    def count_slots(self) -> Generator[None, None, Slots]:
        """Count the slots of held device blocks as `slots` does, in slices; the return value is the breakdown.

        If block steps are applied between the slices, each sequence is counted at the time of its slice.
        """
        count = SlotCounter(self.device, self.spec.block_size)
        sequences = list(self.sequences.values())
        some: list[SequenceTable] = []
        entries = 0
        for sequence in sequences:
            some.append(sequence)
            entries += len(sequence.table) - sequence.computed_tokens // self.spec.block_size
            if len(some) >= _SLICE_SEQUENCES or entries >= _SLICE_ENTRIES:
                count.add(some)
                some, entries = [], 0
                yield
        count.add(some)
        return count.slots(sum(map(len, self.state.pins.values())))

    @property
    def usage(self) -> float:
        """Share of the device blocks that are held, 0 to 1, in the kind that has the least room."""
        return max(kind.device.counts.held / kind.device.total for kind in self.state.kinds)

    @property
    def pinned_blocks(self) -> int:
        """Number of pinned blocks. Counted again only if the pins have changed since the last call."""
        pins = list(self.state.pins.values())
        if pins != self._pins_counted:
            self._pins_counted, self._pinned_blocks = pins, len({block for blocks in pins for block in blocks})
        return self._pinned_blocks

    def withhold(self, device: Iterable[int], host: Iterable[int], kind: int = 0) -> None:
        """Withhold blocks of a kind whose reference counts are correct. The next block step's result lists them."""
        state = self.state.kinds[kind]
        state.withhold(
            {block: state.device.ref_count(block) for block in device},
            {block: state.host.ref_count(block) for block in host},
        )

    def dismantle(self) -> Generator[None, None, None]:
        """Free the memory of a pool that is no longer used, in slices, because freeing all at once takes long."""
        for kind in self.state.kinds:
            while kind.sequences:
                _, sequence = kind.sequences.popitem()
                while sequence.table:
                    del sequence.table[-_SLICE_ENTRIES:]
                    yield
            for tier in (kind.device, kind.host):
                yield from tier.dismantle()

    def violations(self) -> list[str]:
        """Check the conservation law as `PoolState.violations` does; return a message for each fault."""
        return self.state.violations()


def _in_slices(remaining: Iterable[int], work: int, budget: int) -> Generator[None, None, int]:
    """Run the parts of a verb, pausing after each `budget` units of work; return the units since the last pause."""
    for done in remaining:
        work += done
        if work >= budget:
            work = 0
            yield
    return work


def _verbs(step: Step, *, in_kinds: bool) -> Iterator[tuple[StepItem, Sequence[Any], _Verb]]:
    """Yield the non-empty lists of a block step with their verbs, in the order of application."""
    lists = (
        *(step.condemns, step.commits, step.trims, step.pins, step.forks),
        *(step.frees, step.swap_outs, step.swap_ins, step.extends, step.allocates),
    )
    for kind, items, verb in zip(_ITEMS, lists, _IN_KINDS if in_kinds else _VERBS, strict=True):
        if items:
            yield kind, items, verb
