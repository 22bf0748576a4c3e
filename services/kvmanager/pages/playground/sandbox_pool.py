"""A pool of 64 blocks that is operated by hand: the real core, with a log."""

from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from blocks import Allocate, Commit, Extend, Fork, Free, FreeReason, Step
from kvmanager import AppliedStep, Pool, PoolSpec
from services.kvmanager.pages.playground import log_messages

BLOCKS = 64
# Maximum length of a sequence in blocks, which contiguous reservation must assume.
_MAX_SEQUENCE_BLOCKS = 20
_MAX_SEQUENCES = 48
_MAX_LINES = 200
# Expected growth of a sequence in blocks, if no final length is given.
_EXPECTED_BLOCKS = 2
_FIRST_TEMPORARY = 1_000_000


class OperationRefused(Exception):
    """An operation was refused and changed nothing; the message is the reason."""


@dataclass
class SequenceText:
    """The tokens of a sequence, its final length, and the sequence from which it was forked."""

    token_ids: list[int]
    final: int
    parent: int = 0


@dataclass(frozen=True)
class LogLine:
    """A line of the log: the number of the operation, the message, and whether it is a refusal."""

    operation: int
    text: str
    refused: bool = False


class SandboxLog:
    """The latest lines of the log."""

    def __init__(self) -> None:
        self.lines: list[LogLine] = []
        self._operation = 1

    def say(self, text: str, *, refused: bool = False) -> None:
        """Append a line."""
        self.lines.append(LogLine(self._operation, text, refused))
        del self.lines[:-_MAX_LINES]

    def next_operation(self) -> None:
        """Start the next operation."""
        self._operation += 1


class SandboxPool:
    """A pool with the texts of its sequences. Invalid operations raise OperationRefused. `block_size` is in tokens."""

    def __init__(self, block_size: int, log: SandboxLog) -> None:
        self.block_size = block_size
        self.longest = _MAX_SEQUENCE_BLOCKS * block_size
        self.core = Pool(PoolSpec("sandbox", 1, "sandbox", block_size, BLOCKS))
        self.texts: dict[int, SequenceText] = {}
        self.say = log.say
        self._steps, self._ids, self._tokens = count(1), count(1), count(1)
        self._temporary = count(_FIRST_TEMPORARY)  # sequences that are freed in the block step of their fork

    def new_tokens(self, count: int) -> list[int]:
        """Return `count` unused tokens."""
        return list(islice(self._tokens, count))

    def text(self, sequence_id: int) -> SequenceText:
        """Return the text of a sequence."""
        if sequence_id not in self.texts:
            raise OperationRefused(f"sequence {sequence_id} does not exist")
        return self.texts[sequence_id]

    def holders(self) -> dict[int, list[int]]:
        """Return the sequences that hold each held block."""
        holders: dict[int, list[int]] = {}
        for sequence_id, sequence in self.core.sequences.items():
            for block in sequence.table:
                holders.setdefault(block, []).append(sequence_id)
        return holders

    def begin_sequence(self, token_ids: list[int], final: int | None = None) -> int:
        """Begin a sequence; return its id."""
        self._check_room(len(token_ids), len(self.texts) + 1)
        sequence_id = next(self._ids)
        expected = final or min(len(token_ids) + _EXPECTED_BLOCKS * self.block_size, self.longest)
        if not len(token_ids) <= expected <= self.longest:
            raise OperationRefused(
                f"the final length must be between {len(token_ids)} and {self.longest} tokens, not {expected}"
            )
        item = Allocate(sequence_id, sequence_id, f"sequence-{sequence_id}", b"", token_ids, len(token_ids))
        applied = self._apply(allocates=[item])
        (table,) = applied.result.tables
        self.texts[sequence_id] = SequenceText(token_ids, expected)
        cached = table.cached_tokens // self.block_size
        began = log_messages.began(sequence_id, len(token_ids), table.block_ids[:cached], table.block_ids[cached:])
        self.say(" ".join([began, *_evictions(applied)]))
        self._commit([sequence_id])
        return sequence_id

    def grow(self, sequence_ids: list[int], tokens: int) -> None:
        """Append `tokens` tokens to each of several sequences of one group, or to none."""
        lengths = {sequence_id: len(self.text(sequence_id).token_ids) for sequence_id in sequence_ids}
        self._check_room(max(lengths.values()) + tokens, 0)
        rooms = [(sequence_id, length + tokens) for sequence_id, length in lengths.items()]
        tables = {sequence_id: list(self._table(sequence_id)) for sequence_id in sequence_ids}
        holders = self.holders()
        applied = self._apply(extends=[Extend(self.core.sequences[sequence_ids[0]].group, rooms)])
        for sequence_id in sequence_ids:
            text = self.text(sequence_id)
            text.token_ids += self.new_tokens(tokens)
            text.final = max(text.final, len(text.token_ids))
            self.say(log_messages.grew(sequence_id, tokens, tables[sequence_id], self._table(sequence_id), holders))
        self._commit_and_log(sequence_ids, applied)

    def fork(self, sequence_id: int) -> int:
        """Fork a sequence; return the id of the child."""
        text = self.text(sequence_id)
        self._check_room(0, len(self.texts) + 1)
        child = next(self._ids)
        self._apply(forks=[Fork(sequence_id, child, len(text.token_ids))])
        self.texts[child] = SequenceText(list(text.token_ids), text.final, sequence_id)
        self.say(log_messages.forked(sequence_id, child, self._table(child), self.core.device))
        self._set_lengths([child])
        return child

    def write(self, sequence_id: int) -> None:
        """Replace the last token: truncate the sequence by a temporary fork, then extend it again."""
        text, holders = self.text(sequence_id), self.holders()
        length, last, device = len(text.token_ids), self._table(sequence_id)[-1], self.core.device
        if length == 1:
            raise OperationRefused(
                f"sequence {sequence_id} has only one token and would be empty without it: free it instead"
            )
        if (device.ref_count(last) > 1 or device.key(last)) and not device.available:
            raise OperationRefused(f"block {last} must be copied, but no block is available")
        applied = self._apply(
            forks=[Fork(sequence_id, temporary := next(self._temporary), length - 1)],
            frees=[Free(temporary, FreeReason.PRUNED)],
            extends=[Extend(self.core.sequences[sequence_id].group, [(sequence_id, length)])],
        )
        (text.token_ids[-1],) = self.new_tokens(1)
        new, copied = self._table(sequence_id)[-1], bool(applied.result.copies)
        self.say(log_messages.rewrote(sequence_id, last, new, holders, copied=copied))
        self._commit_and_log([sequence_id], applied)

    def free(self, sequence_ids: list[int], reason: FreeReason) -> None:
        """Free sequences."""
        for sequence_id in sequence_ids:
            table = list(self._table(sequence_id))
            self._apply(frees=[Free(sequence_id, reason)])
            del self.texts[sequence_id]
            self.say(log_messages.ended(sequence_id, reason, table, self.core.device))

    def _check_room(self, tokens: int, sequences: int) -> None:
        if tokens > self.longest:
            raise OperationRefused(f"a sequence must have at most {self.longest} tokens, not {tokens}")
        if sequences > _MAX_SEQUENCES:
            raise OperationRefused(f"there are already {_MAX_SEQUENCES} sequences, which is the maximum")

    def _table(self, sequence_id: int) -> list[int]:
        self.text(sequence_id)
        return self.core.sequences[sequence_id].table

    def _apply(self, **items: Any) -> AppliedStep:
        applied = self.core.apply(Step(next(self._steps), **items))
        if applied.result.refusals:
            raise OperationRefused(applied.result.refusals[0].detail)
        return applied

    def _commit_and_log(self, sequence_ids: list[int], applied: AppliedStep) -> None:
        for line in _evictions(applied):
            self.say(line)
        self._commit(sequence_ids)

    def _commit(self, sequence_ids: list[int]) -> None:
        """Commit whole blocks and set the lengths, as an engine does after computing the tokens."""
        commits, size = [], self.block_size
        for sequence_id in sequence_ids:
            sequence, tokens = self.core.sequences[sequence_id], self.text(sequence_id).token_ids
            first, whole = sequence.committed_blocks, len(tokens) // size
            if whole > first:
                commits.append(Commit(sequence_id, first, tokens[first * size : whole * size]))
        self._apply(commits=commits)
        self._set_lengths(sequence_ids)

    def _set_lengths(self, sequence_ids: list[int]) -> None:
        self._apply(lengths=[(sequence_id, len(self.text(sequence_id).token_ids)) for sequence_id in sequence_ids])


def _evictions(applied: AppliedStep) -> list[str]:
    return [log_messages.evicted([block for block, _ in applied.evicted])] if applied.evicted else []
