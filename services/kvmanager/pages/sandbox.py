"""A pool of 64 blocks that a person drives by hand: the real core, and words for what it does."""

from collections.abc import Generator
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import kvmanager
from blocks import Allocate, Commit, Extend, Fork, Free, FreeReason, Step
from kvmanager import Applied, Pool, PoolSpec
from services.kvmanager.pages import operations as op
from services.kvmanager.pages.beam import BeamExample
from services.kvmanager.pages.contiguous import ContiguousMemory, Demand, policies
from services.kvmanager.pages.phrases import counted, joined, listed, verb

BLOCKS = 64
# In blocks: what a sequence may become, and what contiguous reservation has to reckon with.
_LONGEST_BLOCKS = 20
_MOST_SEQUENCES = 48
_MOST_OPERATIONS = 400
_LINES = 200
# Blocks that a sequence is expected to grow by where nobody says.
_EXPECTED_BLOCKS = 2
_FIRST_PASSING = 1_000_000


class Refused(Exception):
    """Something that cannot be done, and why; nothing of it was done."""


@dataclass
class Text:
    """What the sandbox knows of a sequence beside the core: its tokens, how long it will be, and where it is from."""

    token_ids: list[int]
    final: int
    parent: int = 0


@dataclass
class Line:
    """A line of the log: which operation, what happened, and whether it was refused."""

    operation: int
    text: str
    refused: bool = False


@dataclass
class State:
    """All that an undo goes back in."""

    pool: Pool
    texts: dict[int, Text] = field(default_factory=dict)
    log: list[Line] = field(default_factory=list)
    words: dict[str, int] = field(default_factory=dict)
    memories: dict[str, ContiguousMemory] = field(default_factory=dict)
    beam: BeamExample = field(default_factory=BeamExample)


class Sandbox:
    """One person's pool. `block_size` in tokens."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.longest = _LONGEST_BLOCKS * block_size
        self.done: list[op.Operation] = []
        spec = PoolSpec("sandbox", 1, "sandbox", self.block_size, BLOCKS)
        slots = BLOCKS * self.block_size
        memories = {name: ContiguousMemory(slots, size_of) for name, size_of in policies(self.longest).items()}
        self.state = State(Pool(spec), memories=memories)
        self.slots = {name: memory.follow([]) for name, memory in memories.items()}
        self._steps, self._ids, self._tokens = count(1), count(1), count(1)
        self._passing = count(_FIRST_PASSING)  # sequences that are gone with the Step that they began in

    @property
    def pool(self) -> Pool:
        """The pool, for whoever wants to see more."""
        return self.state.pool

    # Operations

    def operate(self, operation: op.Operation) -> None:
        """Do an operation, or say in the log why it was refused."""
        if len(self.done) >= _MOST_OPERATIONS:
            self.say("These are as many operations as a sandbox remembers: begin anew.", refused=True)
            return
        try:
            self._do(operation)
        except Refused as refused:
            self.say(f"Refused: {refused}.", refused=True)
        self.done.append(operation)  # also if refused: done once more, it uses up the same ids
        self._follow()

    def undone(self) -> "Generator[None, None, Sandbox]":
        """Return, in slices, a sandbox in which all but the last operation were done: same operations, same ids."""
        again = Sandbox(self.block_size)
        for operation in self.done[:-1]:
            again.operate(operation)
            yield
        return again

    def _do(self, operation: op.Operation) -> None:
        match operation:
            case op.New():
                self._begin_sequence(operation)
            case op.Append():
                self.grow([operation.sequence], operation.tokens)
            case op.Fork():
                self.fork(operation.sequence)
            case op.Write():
                self._write(operation.sequence)
            case op.Free():
                self.free([operation.sequence], FreeReason.FINISHED)
            case op.Beam():
                self.state.beam.next(self)

    def _begin_sequence(self, new: op.New) -> None:
        words = new.text.split()
        if bool(words) == (new.tokens is not None):
            raise Refused("say how many tokens the sequence begins with, or give a text")
        tokens = [self._word(word) for word in words] or [next(self._tokens) for _ in range(new.tokens or 0)]
        self.begin_sequence(tokens, new.final)

    def begin_sequence(self, token_ids: list[int], final: int | None = None) -> int:
        """Let a sequence begin; return its id. Raises Refused."""
        self._check_room(len(token_ids), len(self.state.texts) + 1)
        number = next(self._ids)
        expected = final or min(len(token_ids) + _EXPECTED_BLOCKS * self.block_size, self.longest)
        if not len(token_ids) <= expected <= self.longest:
            raise Refused(f"a final length of {expected} tokens is not within {len(token_ids)} to {self.longest}")
        item = Allocate(number, number, f"sequence-{number}", b"", token_ids, len(token_ids))
        applied = self._apply(allocates=[item])
        (table,) = applied.result.tables
        self.state.texts[number] = Text(token_ids, expected)
        cached = table.cached_tokens // self.block_size
        granted = table.block_ids[cached:]
        text = f"Sequence {number} began with {counted(len(token_ids), 'token')}"
        if cached:
            text += f": {listed(table.block_ids[:cached])} already had its beginning and {verb(cached)} shared"
            text += f", {listed(granted)} {verb(len(granted))} granted"
        else:
            text += f" in {listed(granted)}"
        self.say(f"{text}.{self._evicted(applied)}")
        self._computed([number])
        return number

    def grow(self, numbers: list[int], tokens: int) -> None:
        """Let sequences of one group go on by so many tokens each, all or none. Raises Refused."""
        lengths = {number: len(self.text(number).token_ids) for number in numbers}
        self._check_room(max(lengths.values()) + tokens, 0)
        rooms = [(number, length + tokens) for number, length in lengths.items()]
        tables = {number: list(self.pool.sequences[number].table) for number in numbers}
        holders = self.holders()
        applied = self._apply(extends=[Extend(self._group(numbers[0]), rooms)])
        for number in numbers:
            self.text(number).token_ids += [next(self._tokens) for _ in range(tokens)]
            text = self.text(number)
            text.final = max(text.final, len(text.token_ids))
            self._tell_growth(number, tokens, tables[number], holders)
        self._say_evicted(applied)
        self._computed(numbers)

    def _tell_growth(self, number: int, tokens: int, before: list[int], holders: dict[int, list[int]]) -> None:
        table = self.pool.sequences[number].table
        granted = table[len(before) :]
        replaced = [(old, new) for old, new in zip(before, table, strict=False) if old != new]
        text = f"Sequence {number} got {counted(tokens, 'token')} more"
        for old, new in replaced:
            text += self._copied(number, old, new, holders)
        if granted:
            text += f"; {listed(granted)} {verb(len(granted))} granted"
        elif not replaced:
            text += f", for which its block {table[-1]} had room"
        self.say(f"{text}.")

    def _copied(self, number: int, old: int, new: int, holders: dict[int, list[int]]) -> str:
        others = [str(other) for other in holders[old] if other != number]
        if others:
            several = len(others) > 1
            who = f"sequence{'s' if several else ''} {joined(others)} {'hold' if several else 'holds'} too"
            return f"; it wrote into block {old}, which {who}: copied to block {new}"
        return f"; block {old} can be found by its key and is not overwritten: copied to block {new}"

    def fork(self, number: int) -> int:
        """Let another sequence begin with all that a sequence has; return its id. Raises Refused."""
        text = self.text(number)
        self._check_room(0, len(self.state.texts) + 1)
        child = next(self._ids)
        self._apply(forks=[Fork(number, child, len(text.token_ids))])
        self.state.texts[child] = Text(list(text.token_ids), text.final, number)
        table = self.pool.sequences[child].table
        counts = sorted({self.pool.device.count(block) for block in table})
        told = f"count {counts[0]}" if len(counts) == 1 else f"counts {counts[0]} to {counts[-1]}"
        both = f"both have {listed(table)}, now of {told}"
        self.say(f"Sequence {child} was forked from {number}: {both}; nothing was copied.")
        self._set_lengths([child])
        return child

    def _write(self, number: int) -> None:
        """Cut the last token off, by a fork that is gone at once, and write another one in its place."""
        text = self.text(number)
        length, sequence = len(text.token_ids), self.pool.sequences[number]
        if length == 1:
            raise Refused(f"sequence {number} has one token alone, and would be empty without it: free it instead")
        last, device = sequence.table[-1], self.pool.device
        if (device.count(last) > 1 or device.key(last)) and not device.available:
            raise Refused(f"block {last} would have to be copied, and no block is free")
        holders, before = self.holders(), list(sequence.table)
        applied = self._apply(
            forks=[Fork(number, passing := next(self._passing), length - 1)],
            frees=[Free(passing, FreeReason.PRUNED)],
            extends=[Extend(sequence.group, [(number, length)])],
        )
        text.token_ids[-1] = next(self._tokens)
        self.say(self._told_write(number, before, holders, copied=bool(applied.result.copies)))
        self._say_evicted(applied)
        self._computed([number])

    def _told_write(self, number: int, before: list[int], holders: dict[int, list[int]], *, copied: bool) -> str:
        old, new = before[-1], self.pool.sequences[number].table[-1]
        text = f"Sequence {number} wrote its last token anew"
        if copied:
            return f"{text}{self._copied(number, old, new, holders)}."
        if old != new:
            return f"{text}; it was the only one in block {old}, so there was nothing to copy: block {new} was granted."
        return f"{text}, in place: nobody else holds block {old}."

    def free(self, numbers: list[int], reason: FreeReason) -> None:
        """Let sequences give their blocks back. Raises Refused."""
        for number in numbers:
            table = list(self._table(number))
            self._apply(frees=[Free(number, reason)])
            del self.state.texts[number]
            end = "was pruned" if reason is FreeReason.PRUNED else "was freed"
            self.say(f"Sequence {number} {end}: {self._whereabouts(table)}.")

    def _whereabouts(self, table: list[int]) -> str:
        places: dict[str, list[int]] = {}
        for block in table:
            state = kvmanager.state_of(self.pool.device, block)
            place = "still held by others" if state is kvmanager.BlockState.HELD else state.name.lower()
            places.setdefault(place, []).append(block)
        parts = [f"{listed(blocks)} {verb(len(blocks), 'is', 'are')} {place}" for place, blocks in places.items()]
        return joined(parts)

    # What operations have in common

    def _apply(self, **items: Any) -> Applied:
        applied = self.pool.apply(Step(next(self._steps), **items))
        if applied.result.refusals:
            raise Refused(applied.result.refusals[0].detail)
        return applied

    def _computed(self, numbers: list[int]) -> None:
        """Give whole blocks their keys, and say how many tokens there are: the engine has computed them."""
        commits, size = [], self.block_size
        for number in numbers:
            sequence, tokens = self.pool.sequences[number], self.text(number).token_ids
            first, whole = sequence.committed, len(tokens) // size
            if whole > first:
                commits.append(Commit(number, first, tokens[first * size : whole * size]))
        self._apply(commits=commits)
        self._set_lengths(numbers)

    def _set_lengths(self, numbers: list[int]) -> None:
        self._apply(lengths=[(number, len(self.text(number).token_ids)) for number in numbers])

    def _follow(self) -> None:
        demands = [Demand(number, len(one.token_ids), one.final) for number, one in self.state.texts.items()]
        self.slots = {name: memory.follow(demands) for name, memory in self.state.memories.items()}

    def text(self, number: int) -> Text:
        """Return what there is of a sequence. Raises Refused."""
        if number not in self.state.texts:
            raise Refused(f"there is no sequence {number}")
        return self.state.texts[number]

    def _table(self, number: int) -> list[int]:
        self.text(number)
        return self.pool.sequences[number].table

    def _group(self, number: int) -> int:
        return self.pool.sequences[number].group

    def _check_room(self, tokens: int, sequences: int) -> None:
        if tokens > self.longest:
            raise Refused(f"{tokens} tokens are more than the {self.longest} that a sequence may become here")
        if sequences > _MOST_SEQUENCES:
            raise Refused(f"there are {_MOST_SEQUENCES} sequences already, which is all that fits on the page")

    def holders(self) -> dict[int, list[int]]:
        """Return which sequences hold each held block."""
        holders: dict[int, list[int]] = {}
        for number, sequence in self.pool.sequences.items():
            for block in sequence.table:
                holders.setdefault(block, []).append(number)
        return holders

    def _word(self, word: str) -> int:
        words = self.state.words
        return words[word] if word in words else words.setdefault(word, next(self._tokens))

    def new_tokens(self, number: int) -> list[int]:
        """Return so many tokens that no sequence has had."""
        return [next(self._tokens) for _ in range(number)]

    def say(self, text: str, *, refused: bool = False) -> None:
        """Write a line into the log."""
        self.state.log.append(Line(len(self.done) + 1, text, refused))
        del self.state.log[:-_LINES]

    def _evicted(self, applied: Applied) -> str:
        if not applied.evicted:
            return ""
        return f" For it the contents of {listed([block for block, _ in applied.evicted])} were given up."

    def _say_evicted(self, applied: Applied) -> None:
        if applied.evicted:
            self.say(self._evicted(applied).strip())
