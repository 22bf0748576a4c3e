"""A client of the KV manager that sends random block steps: more than a scheduler sends, and all that is allowed.

It keeps the tokens of its sequences, runs the copies of each answer on its memory, and writes the digests of new
tokens into granted blocks, as an engine does. So a block that is shared, copied, kept or reported wrongly has other
contents than the tokens of its tables and keys.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import NamedTuple

from blocks import (
    Allocate,
    Commit,
    Condemn,
    CondemnReason,
    Extend,
    Fork,
    Free,
    FreeReason,
    Length,
    Pin,
    Reattached,
    Reset,
    Step,
    StepResult,
    Unpin,
    root_key,
)
from engine.gpu.copy_stream import InlineCopyStream
from engine.run.block_copies import BlockCopies
from engine.schedule.pool.step_builder import StepBuilder
from engine.schedule.step_plan import Copies
from kvmanager import Pool
from kvmanager.pool_state import SequenceTable
from simulation.digest_memory import DigestMemory, chain
from simulation.invariants.expected_contents import ExpectedContents
from simulation.network.connections import Network
from simulation.processes.attached import FINGERPRINT, AttachedProcess, EngineSize, Incarnation
from simulation.processes.kept import SharedMemory

_SALTS = (b"", b"salt")
_MOST_RESETS = 2
_MOST_PINS = 2
_CONDEMN_SHARE = 0.03  # of the block steps
_MOST_CONDEMNED = 3  # at once
_MOST_SEQUENCES = 30
_LETTERS = 3  # different tokens, so that prompts share prefixes
_LONGEST_PROMPT = 9
_LONGEST_EXTENSION = 5
_LONGEST_PAUSE_SECONDS = 0.05


class StepsPlan(NamedTuple):
    """The number of block steps, and the seed of their items."""

    seed: int
    steps: int


class StepsProcess(AttachedProcess):
    """Sends a number of random block steps, and then frees everything."""

    def __init__(
        self,
        network: Network,
        clock: Callable[[], float],
        engine_id: str,
        incarnation: Incarnation,
        size: EngineSize,
        plan: StepsPlan,
        shared: SharedMemory | None = None,
    ) -> None:
        super().__init__(network, clock, engine_id, incarnation, size, shared)
        self._random = Random(plan.seed)
        self._steps_left = plan.steps
        self.memory = DigestMemory(size.capacity(), shared.kinds if shared else ())
        self.expected = shared.expected if shared else ExpectedContents()
        self._copies = BlockCopies(self.memory, InlineCopyStream(), size.block_size)  # type: ignore[arg-type]
        self._tokens: dict[int, list[int]] = {}  # of each sequence, as many as it has room for
        self._roots: dict[int, bytes] = {}  # of each sequence, by its salt and the resets before it
        self._asked: Step | None = None  # not answered yet
        self._last_step = 0
        self._last_id = 0  # of a sequence or group
        self._resets = self._kept.resets if self._kept else 0  # that the manager has applied
        self._next_at = clock()
        self.loop.run(lambda: self._attach(lambda: None))

    @property
    def at_rest(self) -> bool:
        """Whether every answer was received, and its copies are made."""
        return self._asked is None and not self.link.has_answers and not self.link.replica.steps_in_flight

    @property
    def done(self) -> bool:
        """Whether all Steps were sent and everything is freed."""
        return self.at_rest and not (self._steps_left or self._pool.sequences or self._pool.state.pins)

    def thread_can_run(self, now: float) -> bool:
        """Return whether an answer waits, or the next block step is due."""
        return self.link.has_answers or (self._may_send and self._next_at <= now)

    def thread_wakes_at(self) -> float | None:
        """Return the time of the next block step, if it can be sent."""
        return self._next_at if self._may_send else None

    def run_thread(self) -> None:
        """Receive answers, or send the next block step."""
        try:
            while (result := self.link.receive()) is not None:
                self._apply(result)
        except Reattached:
            if self._asked is not None:
                self._resets += _resets_of(self._asked)
            self._follow_pool()  # of the block step in flight, grants and moves are undone
        if self._may_send and self._next_at <= self._clock():
            self._send()

    def finish(self) -> None:
        """Send no more random block steps; free everything."""
        self._steps_left = 0

    def table_faults(self) -> list[str]:
        """Return a message for each sequence whose blocks do not contain its tokens. Call it at rest."""
        found = []
        for sequence in self._pool.sequences.values():
            memory = self.memory.host if sequence.swapped else self.memory.device
            expected = list(chain(0, self._tokens[sequence.id]))
            held = memory[sequence.table].flatten()[: len(expected)].tolist()
            if held != expected:
                found.append(f"sequence {sequence.id} of {self.name} has {held} in place of {expected}")
        return found

    @property
    def _pool(self) -> Pool:
        return self.link.replica.pool

    @property
    def _may_send(self) -> bool:
        return self.link.ready and self.at_rest and not self.done

    # Answers.

    def _apply(self, result: StepResult) -> None:
        asked = self._asked
        assert asked is not None, "only a Step in flight is answered"
        self._resets += _resets_of(asked)  # which come before allocates
        copies = Copies(result.device_to_host, result.host_to_device, result.copies)
        self._copies.make((copies,))
        if self.seals:
            self.seals.on_copied(copies)
        cached = {change.sequence: change.cached_tokens for change in result.tables}
        for allocate in asked.allocates:
            if allocate.sequence in self._pool.sequences:
                self._tokens[allocate.sequence] = list(allocate.token_ids[: cached[allocate.sequence]])
                self._roots[allocate.sequence] = root_key(FINGERPRINT, allocate.salt, self._resets)
        self._follow_pool()
        prompts = {allocate.sequence: allocate.token_ids for allocate in asked.allocates}
        for number in cached.keys() & self._pool.sequences.keys():
            if not self._pool.sequences[number].swapped:
                self._write(number, prompts.get(number, ()))

    def _follow_pool(self) -> None:
        """Follow the forks and frees of the block step in flight, which has ended."""
        asked, self._asked = self._asked, None
        sequences = self._pool.sequences
        for fork in asked.forks if asked is not None else ():
            if fork.child in sequences:
                self._tokens[fork.child] = self._tokens[fork.parent][: fork.length]
                self._roots[fork.child] = self._roots[fork.parent]
        self._tokens = {number: self._tokens[number][: one.room_tokens] for number, one in sequences.items()}

    def _write(self, number: int, prompt: Sequence[int]) -> None:
        """Fill the room of a sequence: with the rest of its prompt, then with random tokens."""
        sequence, tokens = self._pool.sequences[number], self._tokens[number]
        begin = len(tokens)
        tokens += prompt[begin : sequence.room_tokens]
        tokens += [self._token() for _ in range(sequence.room_tokens - len(tokens))]
        for position, digest in enumerate(chain(0, tokens)):
            if position >= begin:
                block, offset = divmod(position, self.size.block_size)
                self.memory.write(sequence.table[block], offset, digest)

    # Block steps.

    def _send(self) -> None:
        self._next_at = self._clock() + self._random.random() * _LONGEST_PAUSE_SECONDS
        items = self._random_items() if self._steps_left else self._last_items()
        self._steps_left = max(0, self._steps_left - 1)
        self._last_step += 1
        self._asked = items.build(self._last_step) or Step(self._last_step)
        self.link.send(self._asked)

    def _last_items(self) -> StepBuilder:
        return StepBuilder(
            pins=[Unpin(pin) for pin in self._pool.state.pins],
            frees=[Free(number, FreeReason.FINISHED) for number in self._pool.sequences],
        )

    def _random_items(self) -> StepBuilder:
        items, random = StepBuilder(), self._random
        for sequence in self._pool.sequences.values():
            self._commit(items, sequence)
            add = random.choice((self._extend, self._extend, self._fork, self._free, self._leave, self._leave))
            if not sequence.swapped or add is self._free:
                add(items, sequence)
        for group, members in self._pool.groups.items():
            if random.random() < 0.2:
                swapped = self._pool.sequences[next(iter(members))].swapped
                (items.swap_ins if swapped else items.swap_outs).append(group)
        self._change_pins(items)
        if random.random() < _CONDEMN_SHARE:
            items.condemns += _random_condemns(random, self._pool)
        if random.random() < 0.5:
            self._allocate(items)
        return items

    def _commit(self, items: StepBuilder, sequence: SequenceTable) -> None:
        size, tokens = self.size.block_size, self._tokens[sequence.id]
        first, whole = sequence.committed_blocks, len(tokens) // self.size.block_size
        if sequence.swapped or whole <= first or self._random.random() < 0.5:
            return
        end = self._random.randint(first + 1, whole)
        self.expected.add(self._roots[sequence.id], tokens)
        items.commits.append(Commit(sequence.id, first, tokens[first * size : end * size]))

    def _extend(self, items: StepBuilder, sequence: SequenceTable) -> None:
        room = sequence.room_tokens + self._random.randint(1, _LONGEST_EXTENSION)
        items.extends.append(Extend(sequence.group, [(sequence.id, room)]))

    def _fork(self, items: StepBuilder, sequence: SequenceTable) -> None:
        if len(self._pool.sequences) + len(items.forks) >= _MOST_SEQUENCES:
            return
        for _ in range(self._random.choice((1, 1, 6))):
            length = self._random.choice((sequence.room_tokens, self._random.randint(1, sequence.room_tokens)))
            items.forks.append(Fork(sequence.id, self._new_id(), length))

    def _free(self, items: StepBuilder, sequence: SequenceTable) -> None:
        items.frees.append(Free(sequence.id, FreeReason.FINISHED))

    def _leave(self, items: StepBuilder, sequence: SequenceTable) -> None:
        items.lengths.append(Length(sequence.id, len(self._tokens[sequence.id])))

    def _change_pins(self, items: StepBuilder) -> None:
        random, pins = self._random, self._pool.state.pins
        committed = [one for one in self._pool.sequences.values() if one.committed_blocks and not one.swapped]
        if pins and random.random() < 0.2:
            items.pins.append(Unpin(random.choice(list(pins))))
        elif committed and len(pins) < _MOST_PINS and random.random() < 0.1:
            sequence = random.choice(committed)
            items.pins.append(Pin(f"p{self._new_id()}", sequence.id, random.randint(1, sequence.committed_blocks)))
        elif self._resets < _MOST_RESETS and random.random() < 0.01:
            items.pins.append(Reset())

    def _allocate(self, items: StepBuilder) -> None:
        random, number = self._random, self._new_id()
        prompt = [self._token() for _ in range(random.randint(1, _LONGEST_PROMPT))]
        compute = random.choice((len(prompt), random.randint(1, _LONGEST_PROMPT)))
        items.allocates.append(Allocate(number, number, f"s{number}", random.choice(_SALTS), prompt, compute))

    def _token(self) -> int:
        return self._random.randrange(_LETTERS)

    def _new_id(self) -> int:
        self._last_id += 1
        return self._last_id


def _random_condemns(random: Random, pool: Pool) -> list[Condemn]:
    """Condemn a few blocks of a tier, of which at least half stay; their contents are right."""
    host = random.random() < 0.3
    tier = pool.state.host if host else pool.state.device
    lost = sum(map(tier.marks.is_withheld_or_marked, range(1, tier.total + 1)))
    most = min(_MOST_CONDEMNED, tier.total // 2 - lost)
    if most <= 0:
        return []
    blocks = [random.randint(1, tier.total) for _ in range(random.randint(1, most))]
    finder = random.choice((0, *pool.sequences))
    return [Condemn(finder, blocks, random.choice(tuple(CondemnReason)), host)]


def _resets_of(step: Step) -> int:
    return sum(isinstance(change, Reset) for change in step.pins)
