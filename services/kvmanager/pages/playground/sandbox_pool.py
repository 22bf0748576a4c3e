"""A pool of 64 blocks that is driven by hand: the real core, and a log of what it does."""

from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from blocks import Allocate, Commit, Extend, Fork, Free, FreeReason, Step
from kvmanager import AppliedStep, Pool, PoolSpec
from services.kvmanager.pages.playground import log_messages

BLOCKS = 64
# In blocks: what a sequence may become, and what contiguous reservation has to reckon with.
_LONGEST_BLOCKS = 20
_MOST_SEQUENCES = 48
_LINES = 200
# Blocks that a sequence is expected to grow by where nobody says.
_EXPECTED_BLOCKS = 2
_FIRST_PASSING = 1_000_000


class OperationRefused(Exception):
    """Something that cannot be done, and why; nothing of it was done."""


@dataclass
class SequenceText:
    """A sequence beside the core: its tokens, its length in the end, and the sequence that it was forked from."""

    token_ids: list[int]
    final: int
    parent: int = 0


@dataclass(frozen=True)
class LogLine:
    """A line of the log: which operation, what happened, and whether it was refused."""

    operation: int
    text: str
    refused: bool = False


class SandboxLog:
    """The latest lines, of the operation under way and those before it."""

    def __init__(self) -> None:
        self.lines: list[LogLine] = []
        self._operation = 1

    def say(self, text: str, *, refused: bool = False) -> None:
        """Write a line."""
        self.lines.append(LogLine(self._operation, text, refused))
        del self.lines[:-_LINES]

    def next_operation(self) -> None:
        """Count the operation under way as done."""
        self._operation += 1


class SandboxPool:
    """A pool, and the texts of its sequences. `block_size` in tokens. What cannot be done raises OperationRefused."""

    def __init__(self, block_size: int, log: SandboxLog) -> None:
        self.block_size = block_size
        self.longest = _LONGEST_BLOCKS * block_size
        self.core = Pool(PoolSpec("sandbox", 1, "sandbox", block_size, BLOCKS))
        self.texts: dict[int, SequenceText] = {}
        self.say = log.say
        self._steps, self._ids, self._tokens = count(1), count(1), count(1)
        self._passing = count(_FIRST_PASSING)  # sequences that are gone with the Step that they began in

    def new_tokens(self, number: int) -> list[int]:
        """Return so many tokens that no sequence has had."""
        return list(islice(self._tokens, number))

    def text(self, number: int) -> SequenceText:
        """Return what there is of a sequence."""
        if number not in self.texts:
            raise OperationRefused(f"there is no sequence {number}")
        return self.texts[number]

    def holders(self) -> dict[int, list[int]]:
        """Return which sequences hold each held block."""
        holders: dict[int, list[int]] = {}
        for number, sequence in self.core.sequences.items():
            for block in sequence.table:
                holders.setdefault(block, []).append(number)
        return holders

    def begin_sequence(self, token_ids: list[int], final: int | None = None) -> int:
        """Let a sequence begin; return its id."""
        self._check_room(len(token_ids), len(self.texts) + 1)
        number = next(self._ids)
        expected = final or min(len(token_ids) + _EXPECTED_BLOCKS * self.block_size, self.longest)
        if not len(token_ids) <= expected <= self.longest:
            raise OperationRefused(
                f"a final length of {expected} tokens is not within {len(token_ids)} to {self.longest}"
            )
        item = Allocate(number, number, f"sequence-{number}", b"", token_ids, len(token_ids))
        applied = self._apply(allocates=[item])
        (table,) = applied.result.tables
        self.texts[number] = SequenceText(token_ids, expected)
        cached = table.cached_tokens // self.block_size
        told = log_messages.began(number, len(token_ids), table.block_ids[:cached], table.block_ids[cached:])
        self.say(" ".join([told, *_cost(applied)]))
        self._computed([number])
        return number

    def grow(self, numbers: list[int], tokens: int) -> None:
        """Let sequences of one group go on by so many tokens each, all or none."""
        lengths = {number: len(self.text(number).token_ids) for number in numbers}
        self._check_room(max(lengths.values()) + tokens, 0)
        rooms = [(number, length + tokens) for number, length in lengths.items()]
        tables = {number: list(self._table(number)) for number in numbers}
        holders = self.holders()
        applied = self._apply(extends=[Extend(self.core.sequences[numbers[0]].group, rooms)])
        for number in numbers:
            text = self.text(number)
            text.token_ids += self.new_tokens(tokens)
            text.final = max(text.final, len(text.token_ids))
            self.say(log_messages.grew(number, tokens, tables[number], self._table(number), holders))
        self._computed_at_cost(numbers, applied)

    def fork(self, number: int) -> int:
        """Let another sequence begin with all that a sequence has; return its id."""
        text = self.text(number)
        self._check_room(0, len(self.texts) + 1)
        child = next(self._ids)
        self._apply(forks=[Fork(number, child, len(text.token_ids))])
        self.texts[child] = SequenceText(list(text.token_ids), text.final, number)
        self.say(log_messages.forked(number, child, self._table(child), self.core.device))
        self._set_lengths([child])
        return child

    def write(self, number: int) -> None:
        """Cut the last token off, by a fork that is gone at once, and write another one in its place."""
        text, holders = self.text(number), self.holders()
        length, last, device = len(text.token_ids), self._table(number)[-1], self.core.device
        if length == 1:
            raise OperationRefused(
                f"sequence {number} has one token alone, and would be empty without it: free it instead"
            )
        if (device.count(last) > 1 or device.key(last)) and not device.available:
            raise OperationRefused(f"block {last} would have to be copied, and no block is free")
        applied = self._apply(
            forks=[Fork(number, passing := next(self._passing), length - 1)],
            frees=[Free(passing, FreeReason.PRUNED)],
            extends=[Extend(self.core.sequences[number].group, [(number, length)])],
        )
        (text.token_ids[-1],) = self.new_tokens(1)
        new, copied = self._table(number)[-1], bool(applied.result.copies)
        self.say(log_messages.rewrote(number, last, new, holders, copied=copied))
        self._computed_at_cost([number], applied)

    def free(self, numbers: list[int], reason: FreeReason) -> None:
        """Let sequences give their blocks back."""
        for number in numbers:
            table = list(self._table(number))
            self._apply(frees=[Free(number, reason)])
            del self.texts[number]
            self.say(log_messages.ended(number, reason, table, self.core.device))

    def _check_room(self, tokens: int, sequences: int) -> None:
        if tokens > self.longest:
            raise OperationRefused(f"{tokens} tokens are more than the {self.longest} that a sequence may become here")
        if sequences > _MOST_SEQUENCES:
            raise OperationRefused(f"there are {_MOST_SEQUENCES} sequences already, which is all that fits on the page")

    def _table(self, number: int) -> list[int]:
        self.text(number)
        return self.core.sequences[number].table

    def _apply(self, **items: Any) -> AppliedStep:
        applied = self.core.apply(Step(next(self._steps), **items))
        if applied.result.refusals:
            raise OperationRefused(applied.result.refusals[0].detail)
        return applied

    def _computed_at_cost(self, numbers: list[int], applied: AppliedStep) -> None:
        for told in _cost(applied):
            self.say(told)
        self._computed(numbers)

    def _computed(self, numbers: list[int]) -> None:
        """Give whole blocks their keys, and say how many tokens there are: the engine has computed them."""
        commits, size = [], self.block_size
        for number in numbers:
            sequence, tokens = self.core.sequences[number], self.text(number).token_ids
            first, whole = sequence.committed, len(tokens) // size
            if whole > first:
                commits.append(Commit(number, first, tokens[first * size : whole * size]))
        self._apply(commits=commits)
        self._set_lengths(numbers)

    def _set_lengths(self, numbers: list[int]) -> None:
        self._apply(lengths=[(number, len(self.text(number).token_ids)) for number in numbers])


def _cost(applied: AppliedStep) -> list[str]:
    """Tell what was given up for a grant, if anything was."""
    return [log_messages.given_up([block for block, _ in applied.evicted])] if applied.evicted else []
