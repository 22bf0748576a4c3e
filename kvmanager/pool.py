"""A pool: the block space of one engine.

One door, `apply`: a Step goes in, what it did comes out, every item all or nothing. Same Steps, same block ids.
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
from kvmanager.observe.slots import SlotCount, Slots
from kvmanager.parts import Parts, complete
from kvmanager.pool_spec import PoolSpec
from kvmanager.pool_state import PoolState, SequenceTable
from kvmanager.tier.tier import Tier
from kvmanager.verbs.admission import allocate
from kvmanager.verbs.growth import extend
from kvmanager.verbs.lifecycle import commit, fork, free
from kvmanager.verbs.pinning import change_pins
from kvmanager.verbs.swapping import swap_in, swap_out

_SLICE = 256  # sequences that are counted at a time: some 0.1 ms
_LOOKED_AT = 8192  # entries of tables that may need a closer look for it
_LISTED = 4096  # ids that are looked at at a time
_LENGTHS = 4096  # lengths that are set at a time: some 0.3 ms
# In units of work, each well below a microsecond.
_ALL_AT_ONCE = 1 << 62
_REFUSAL_WORK = 8
_TOKENS_HASHED_TOGETHER = 16

# What grows an answer without a bound of its own.
_GRANTS = (StepItem.SWAP_OUT, StepItem.SWAP_IN, StepItem.EXTEND, StepItem.ALLOCATE)

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
        """Start with every block free and no sequence, or go on with `state`."""
        self.state = state or PoolState(spec, Tier(spec.device_blocks), Tier(spec.host_blocks))
        self.last_step = 0
        self._pins_counted: list[list[int]] = []
        self._pinned_blocks = 0

    @property
    def spec(self) -> PoolSpec:
        """What the engine said of its pool."""
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
    def sequences(self) -> dict[int, SequenceTable]:
        """The live sequences by their ids."""
        return self.state.sequences

    @property
    def groups(self) -> dict[int, list[int]]:
        """The ids of live groups' sequences."""
        return self.state.groups

    def apply(self, step: Step) -> AppliedStep:
        """Apply a Step, item by item. Raises StepOutOfOrder, and does nothing, unless its number is a new highest."""
        return complete(self.applying(step, _ALL_AT_ONCE))

    def applying(self, step: Step, budget: int) -> Generator[None, None, AppliedStep]:  # noqa: C901  (one frame, for speed)
        """Apply a Step in slices; the generator's return value says what it did. Raises StepOutOfOrder as `apply` does.

        A slice ends after the item with which it has done `budget` units of work: a block touched, 16 tokens hashed, an
        item; and within an item that is done in parts. At every pause the conservation law holds. Nothing else may
        change the pool before the last slice.
        """
        if step.step <= self.last_step:
            raise StepOutOfOrder(f"step {step.step} came after step {self.last_step}")
        self.last_step = step.step
        outcome = Outcome()
        state, effects, refusals = self.state, outcome.effects, outcome.refusals
        withheld = state.take_withheld()
        work = moved = 0
        # One frame and no call but the verb's: a decoding batch comes through here at every step.
        for kind, items, verb in _verbs(step):
            hashes, grants = kind is StepItem.ALLOCATE, kind in _GRANTS
            for position, item in enumerate(items):
                seen = len(effects)
                try:
                    if grants and moved >= limits.MAX_STEP_BLOCKS:
                        raise OutOfBlocks(f"the Step has {moved} blocks already; the next one may ask again")
                    rest = verb(state, item, outcome)
                    if rest is not None:
                        work = yield from _in_slices(rest, work, budget)
                    blocks = len(effects[seen][3]) * (len(effects) - seen) if len(effects) > seen else 0
                    moved += blocks
                    work += 1 + blocks if rest is None else 1
                except ItemRefused as refused:
                    refusals.append(Refusal(kind, position, _REFUSALS[type(refused)], str(refused)))
                    work += _REFUSAL_WORK
                if hashes:
                    work += len(item.token_ids) // _TOKENS_HASHED_TOGETHER
                if work >= budget:
                    work = 0
                    yield
        for start in range(0, len(step.lengths), _LENGTHS):
            if start:
                yield
            self._set_lengths(step.lengths, start, outcome)
        yield from _in_slices(state.end_step(), work, budget)
        return outcome.applied(step.step, self.device.counts, self.host.counts, withheld)

    def _set_lengths(self, lengths: Sequence[tuple[int, int]], start: int, outcome: Outcome) -> None:
        # A plain loop: every running sequence has an entry in every Step, and nearly every entry is right.
        part = lengths[start : start + _LENGTHS] if len(lengths) > _LENGTHS else lengths
        sequences = self.state.sequences
        try:
            for number, tokens in part:
                sequence = sequences[number]
                if tokens > sequence.room or tokens < 0:
                    break
                sequence.computed = tokens
            else:
                return
        except KeyError:
            pass
        self._set_lengths_or_refuse(part, start, outcome)

    def _set_lengths_or_refuse(self, lengths: Sequence[tuple[int, int]], start: int, outcome: Outcome) -> None:
        for position, (number, tokens) in enumerate(lengths, start):
            sequence = self.state.sequences.get(number)
            if sequence is None:
                detail = f"there is no sequence {number}"
                outcome.refusals.append(Refusal(StepItem.LENGTH, position, StepRefusal.UNKNOWN, detail))
            elif not 0 <= tokens <= sequence.room:
                detail = f"{tokens} tokens computed, but there is room for {sequence.room}"
                outcome.refusals.append(Refusal(StepItem.LENGTH, position, StepRefusal.INVALID, detail))
            else:
                sequence.computed = tokens

    def listing_sequences(self, after: int, most: int) -> Generator[None, None, list[SequenceTable]]:
        """Find the sequences with the lowest ids above one, at most so many, in slices; the return value lists them.

        What Steps begin or end between the slices may be among them or not.
        """
        lowest: list[int] = []
        numbers = list(self.sequences)
        for start in range(0, len(numbers), _LISTED):
            if start:
                yield
            some = [number for number in numbers[start : start + _LISTED] if number > after]
            lowest = sorted([*lowest, *some])[:most]
        return [self.sequences[number] for number in lowest if number in self.sequences]

    def computed_tokens(self) -> int:
        """Return the tokens computed in held device blocks, those of shared blocks counted once."""
        return self.slots().tokens

    def slots(self) -> Slots:
        """Say what the slots of held device blocks are good for. Takes time by the number of sequences."""
        return complete(self.count_slots())

    def count_slots(self) -> Generator[None, None, Slots]:
        """Say what the slots of held device blocks are good for, a slice of the sequences at a time.

        Where Steps are applied between two slices, each sequence counts as it was when its slice came.
        """
        count = SlotCount(self.device, self.spec.block_size)
        sequences = list(self.sequences.values())
        some: list[SequenceTable] = []
        entries = 0
        for sequence in sequences:
            some.append(sequence)
            entries += len(sequence.table) - sequence.computed // self.spec.block_size
            if len(some) >= _SLICE or entries >= _LOOKED_AT:
                count.add(some)
                some, entries = [], 0
                yield
        count.add(some)
        return count.slots(sum(map(len, self.state.pins.values())))

    @property
    def pinned_blocks(self) -> int:
        """Blocks that pins hold. Looks at them only when pins have changed since it was last asked."""
        pins = list(self.state.pins.values())
        if pins != self._pins_counted:
            self._pins_counted, self._pinned_blocks = pins, len({block for blocks in pins for block in blocks})
        return self._pinned_blocks

    def withhold(self, device: Iterable[int], host: Iterable[int]) -> None:
        """Take blocks out of circulation whose counts are right. The next Step's result lists them."""
        self.state.withhold(
            {block: self.device.count(block) for block in device}, {block: self.host.count(block) for block in host}
        )

    def dismantle(self) -> Generator[None, None, None]:
        """Give the memory of a pool that nobody uses any more back, with pauses: all at once takes long."""
        while self.sequences:
            _, sequence = self.sequences.popitem()
            while sequence.table:
                del sequence.table[-_LOOKED_AT:]
                yield
        for tier in (self.device, self.host):
            yield from tier.dismantle()

    def violations(self) -> list[str]:
        """Check the conservation law: each id in one place, count = number of holders; a sentence for each fault."""
        return self.state.violations()


def _in_slices(rest: Iterable[int], work: int, budget: int) -> Generator[None, None, int]:
    """Do the rest of a verb, pausing whenever `budget` units are done; return those that the last slice has done."""
    for done in rest:
        work += done
        if work >= budget:
            work = 0
            yield
    return work


def _verbs(step: Step) -> Iterator[tuple[StepItem, Sequence[Any], Callable[[PoolState, Any, Outcome], Parts | None]]]:
    """Yield the lists of a Step that have items, in the order of their application, each with its verb."""
    if step.commits:
        yield StepItem.COMMIT, step.commits, commit
    if step.pins:
        yield StepItem.PIN, step.pins, change_pins
    if step.forks:
        yield StepItem.FORK, step.forks, fork
    if step.frees:
        yield StepItem.FREE, step.frees, free
    if step.swap_outs:
        yield StepItem.SWAP_OUT, step.swap_outs, swap_out
    if step.swap_ins:
        yield StepItem.SWAP_IN, step.swap_ins, swap_in
    if step.extends:
        yield StepItem.EXTEND, step.extends, extend
    if step.allocates:
        yield StepItem.ALLOCATE, step.allocates, allocate
