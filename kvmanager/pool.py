"""A pool: the block space of one engine.

One door, `apply`: a Step goes in, a StepResult comes out, every item all or nothing. Same Steps, same block ids.
"""

from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

from kvmanager.books import Books, Sequence
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
from kvmanager.pool_spec import PoolSpec
from kvmanager.slots import SlotCount, Slots
from kvmanager.step import Refusal, Step, StepItem, StepRefusal, StepResult
from kvmanager.tier import Tier
from kvmanager.verbs.admission import allocate
from kvmanager.verbs.growth import extend
from kvmanager.verbs.lifecycle import commit, fork, free
from kvmanager.verbs.pinning import change_pins
from kvmanager.verbs.swapping import swap_in, swap_out

_Item = TypeVar("_Item")
_SLICE = 256  # sequences that are counted at a time: some 0.1 ms

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

    def __init__(self, spec: PoolSpec, books: Books | None = None) -> None:
        """Start with every block free and no sequence, or go on with `books`."""
        self.books = books or Books(spec, Tier(spec.device_blocks), Tier(spec.host_blocks))
        self.last_step = 0
        self._pins_counted: list[list[int]] = []
        self._pinned_blocks = 0

    @property
    def spec(self) -> PoolSpec:
        """What the engine said of its pool."""
        return self.books.spec

    @property
    def device(self) -> Tier:
        """The blocks in device memory."""
        return self.books.device

    @property
    def host(self) -> Tier:
        """The blocks in host memory."""
        return self.books.host

    @property
    def sequences(self) -> dict[int, Sequence]:
        """The live sequences by their ids."""
        return self.books.sequences

    @property
    def groups(self) -> dict[int, list[int]]:
        """The ids of live groups' sequences."""
        return self.books.groups

    def apply(self, step: Step) -> StepResult:
        """Apply a Step, item by item. Raises StepOutOfOrder, and does nothing, unless its number is a new highest."""
        if step.step <= self.last_step:
            raise StepOutOfOrder(f"step {step.step} came after step {self.last_step}")
        self.last_step = step.step
        result = StepResult(step.step)
        result.withheld, result.host_withheld = self.books.take_withheld()
        self._apply_each(StepItem.COMMIT, step.commits, commit, result)
        self._apply_each(StepItem.PIN, step.pins, change_pins, result)
        self._apply_each(StepItem.FORK, step.forks, fork, result)
        self._apply_each(StepItem.FREE, step.frees, free, result)
        self._apply_each(StepItem.SWAP_OUT, step.swap_outs, swap_out, result)
        self._apply_each(StepItem.SWAP_IN, step.swap_ins, swap_in, result)
        self._apply_each(StepItem.EXTEND, step.extends, extend, result)
        self._apply_each(StepItem.ALLOCATE, step.allocates, allocate, result)
        self._set_lengths(step.lengths, result)
        self.books.end_step()
        result.device = self.device.counts
        result.host = self.host.counts
        return result

    def _apply_each(
        self,
        kind: StepItem,
        items: Iterable[_Item],
        verb: Callable[[Books, _Item, StepResult], None],
        result: StepResult,
    ) -> None:
        if not items:
            return
        books = self.books
        for position, item in enumerate(items):
            try:
                verb(books, item, result)
            except ItemRefused as refused:
                result.refusals.append(Refusal(kind, position, _REFUSALS[type(refused)], str(refused)))

    def _set_lengths(self, lengths: Iterable[tuple[int, int]], result: StepResult) -> None:
        # A plain loop: every running sequence has an entry in every Step, and nearly every entry is right.
        sequences = self.books.sequences
        try:
            for number, tokens in lengths:
                sequence = sequences[number]
                if tokens > sequence.room or tokens < 0:
                    break
                sequence.computed = tokens
            else:
                return
        except KeyError:
            pass
        self._set_lengths_or_refuse(lengths, result)

    def _set_lengths_or_refuse(self, lengths: Iterable[tuple[int, int]], result: StepResult) -> None:
        for position, (number, tokens) in enumerate(lengths):
            sequence = self.books.sequences.get(number)
            if sequence is None:
                detail = f"there is no sequence {number}"
                result.refusals.append(Refusal(StepItem.LENGTH, position, StepRefusal.UNKNOWN, detail))
            elif not 0 <= tokens <= sequence.room:
                detail = f"{tokens} tokens computed, but there is room for {sequence.room}"
                result.refusals.append(Refusal(StepItem.LENGTH, position, StepRefusal.INVALID, detail))
            else:
                sequence.computed = tokens

    def computed_tokens(self) -> int:
        """Return the tokens computed in held device blocks, those of shared blocks counted once."""
        return self.slots().tokens

    def slots(self) -> Slots:
        """Say what the slots of held device blocks are good for. Takes time by the number of sequences."""
        work = self.count_slots()
        while True:
            try:
                next(work)
            except StopIteration as end:
                slots: Slots = end.value
                return slots

    def count_slots(self) -> Generator[None, None, Slots]:
        """Say what the slots of held device blocks are good for, a slice of the sequences at a time.

        Where Steps are applied between two slices, each sequence counts as it was when its slice came.
        """
        count = SlotCount(self.device, self.spec.block_size)
        sequences = list(self.sequences.values())
        for start in range(0, len(sequences), _SLICE):
            if start:
                yield
            count.add(sequences[start : start + _SLICE])
        return count.slots(sum(map(len, self.books.pins.values())))

    @property
    def pinned_blocks(self) -> int:
        """Blocks that pins hold. Looks at them only when pins have changed since it was last asked."""
        pins = list(self.books.pins.values())
        if pins != self._pins_counted:
            self._pins_counted, self._pinned_blocks = pins, len({block for blocks in pins for block in blocks})
        return self._pinned_blocks

    def withhold(self, device: Iterable[int], host: Iterable[int]) -> None:
        """Take blocks out of circulation whose counts are right. The next Step's result lists them."""
        self.books.withhold(
            {block: self.device.count(block) for block in device}, {block: self.host.count(block) for block in host}
        )

    def dismantle(self) -> Generator[None, None, None]:
        """Give the memory of a pool that nobody uses any more back, with pauses: all at once takes long."""
        for tier in (self.device, self.host):
            yield from tier.dismantle()

    def violations(self) -> list[str]:
        """Check the conservation law: each id in one place, count = number of holders; a sentence for each fault."""
        return self.books.violations()
