"""The binary form of a step plan, as rank 0 sends it to the other ranks.

A rank needs what is computed, not how results are sampled: tokens, positions, block tables, copies, and the rows of
logits. All numbers are little-endian 32-bit integers. Tables are sent as changes against the plan before: most
sequences of a step were in that one, with the same table or one block less. So a message of 256 decoding sequences has
about 7 KiB whatever their length.

    header      number of the message, step (two halves), flags, and the lengths of the parts below
    copies      for each result three counts, then pairs of source and destination
    rows        for each work: row of its sequence in the plan before or -1, blocks kept, blocks added, start, tokens,
                sampled rows
    scored      for each work with prompt tokens to score: its row, first position, tokens
    blocks      the added blocks of all rows
    tokens      the token ids of all rows
"""

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise, starmap
from sys import byteorder
from typing import NamedTuple

from blocks import Copy
from engine.errors import RankFailed
from engine.schedule.request import Sampling
from engine.schedule.step_plan import Copies, PromptPart, StepPlan, Work

assert byteorder == "little", "the kernels are for x86 and ARM"

_HEADER = 9
_ROW = 6
_SCORED = 3
_SHARES_TOKENS = 1
_HALF = 32
_NOT_SAMPLED_HERE = Sampling(0.0)

_MOST = 1 << 24  # of anything in one plan

Table = tuple[int, ...]


class _CountWrong(ValueError):
    """A count in a plan that its numbers contradict."""


class PlanEncoder:
    """Encodes the plans of one engine, in launch order."""

    def __init__(self) -> None:
        self._number = 0
        self._rows: dict[int, int] = {}  # row of each sequence in the plan before
        self._tables: list[Table] = []

    def encode(self, plan: StepPlan, *, shares_tokens: bool) -> bytes:
        """Return the message of a plan. With `shares_tokens`, the sampled tokens are broadcast after the step."""
        rows, blocks = self._encode_rows(plan.work)
        scored = [
            number
            for row, work in enumerate(plan.work)
            if (part := work.to_score)
            for number in (row, part.position, len(part.token_ids))
        ]
        copies = [number for result in plan.copies for number in _numbers_of(result)]
        tokens = [token for work in plan.work for token in work.token_ids]
        parts: tuple[list[int], ...] = (copies, rows, scored, blocks, tokens)
        flags = _SHARES_TOKENS if shares_tokens else 0
        step = plan.step & 0x7FFFFFFF, plan.step >> 31
        header = [self._number & 0x7FFFFFFF, *step, flags, *map(len, parts)]
        self._number += 1
        message = array("i", header)
        for numbers in parts:
            message.extend(numbers)
        return message.tobytes()

    def _encode_rows(self, works: Sequence[Work]) -> tuple[list[int], list[int]]:
        rows: list[int] = []
        blocks: list[int] = []
        for work in works:
            before = self._rows.get(work.sequence, -1)
            table = work.block_table
            kept = _common(self._tables[before], table) if before >= 0 else 0
            blocks += table[kept:]
            samples = len(work.sample_indices) if work.samples else 0
            rows += (before, kept, len(table) - kept, work.start, len(work.token_ids), samples)
        self._rows = {work.sequence: row for row, work in enumerate(works)}
        self._tables = [work.block_table for work in works]
        return rows, blocks


class ReceivedPlan(NamedTuple):
    """A plan as the other ranks receive it: without sampling, rules and requests' sequence numbers.

    A sequence has the same number in consecutive plans. `shares_tokens` is that of `encode`.
    """

    plan: StepPlan
    shares_tokens: bool


class PlanDecoder:
    """Decodes the messages of one encoder, in their order."""

    def __init__(self) -> None:
        self._number = 0
        self._sequences: list[int] = []  # of the plan before, by row
        self._tables: list[Table] = []
        self._new = 0  # number of the next new sequence

    def decode(self, message: bytes) -> ReceivedPlan:
        """Return the plan of the next message. Raises RankFailed if it is not the next one, or is damaged."""
        numbers = _numbers_in(message)
        number, low, high, flags, *lengths = numbers[:_HEADER]
        if number != self._number & 0x7FFFFFFF:
            raise RankFailed(f"plan {number} arrived where plan {self._number} was expected")
        if min(lengths) < 0 or _HEADER + sum(lengths) != len(numbers) or lengths[1] % _ROW or lengths[2] % _SCORED:
            raise RankFailed(f"plan {number} is damaged: its parts have {lengths} numbers, it has {len(numbers)}")
        self._number += 1
        copies, rows, scored, blocks, tokens = _parts(numbers[_HEADER:], lengths)
        try:
            work = self._decode_rows(rows, scored, iter(blocks), iter(tokens))
            plan = StepPlan(high << 31 | low, tuple(_copies_of(iter(copies))), work)
        except _CountWrong as error:
            raise RankFailed(f"plan {number} is damaged: it has no {error} numbers") from error
        return ReceivedPlan(plan, bool(flags & _SHARES_TOKENS))

    def _decode_rows(
        self, rows: Sequence[int], scored: Sequence[int], blocks: Iterator[int], tokens: Iterator[int]
    ) -> tuple[Work, ...]:
        to_score = {
            row: PromptPart(position, (0,) * _bounded(count), 0) for row, position, count in _tuples(scored, _SCORED)
        }
        work: list[Work] = []
        for row, (before, kept, added, start, fed, samples) in enumerate(_tuples(rows, _ROW)):
            if before >= len(self._tables) or (before >= 0 and kept > len(self._tables[before])):
                raise RankFailed(f"row {row} of a plan continues a table that this rank does not have")
            table = (self._tables[before][:kept] if before >= 0 else ()) + _take(blocks, added)
            sequence = self._sequences[before] if before >= 0 else self._next_sequence()
            work.append(
                Work(
                    sequence,
                    _take(tokens, fed),
                    start,
                    table,
                    samples > 0,
                    _NOT_SAMPLED_HERE,
                    tuple(range(_bounded(samples))),
                    to_score=to_score.get(row),
                )
            )
        self._sequences = [one.sequence for one in work]
        self._tables = [one.block_table for one in work]
        return tuple(work)

    def _next_sequence(self) -> int:
        self._new += 1
        return self._new


def _common(before: Table, table: Table) -> int:
    """Return the number of equal blocks at the beginning of two tables."""
    if table[: len(before)] == before:
        return len(before)
    return next((place for place, (old, new) in enumerate(zip(before, table, strict=False)) if old != new), len(table))


def _numbers_of(copies: Copies) -> Iterator[int]:
    pairs_by_direction = copies[:3]  # ranks have one kind of blocks
    yield from map(len, pairs_by_direction)
    for pairs in pairs_by_direction:
        for source, destination in pairs:
            yield source
            yield destination


def _copies_of(numbers: Iterator[int]) -> Iterator[Copies]:
    for first in numbers:
        counts = (first, *_take(numbers, 2))
        swap_in, on_device, swap_out = (tuple(starmap(Copy, _tuples(_take(numbers, 2 * count), 2))) for count in counts)
        yield Copies(swap_in, on_device, swap_out)


def _numbers_in(message: bytes) -> list[int]:
    numbers = array("i")
    if len(message) % numbers.itemsize or len(message) < _HEADER * numbers.itemsize:
        raise RankFailed(f"a plan of {len(message)} bytes is damaged")
    numbers.frombytes(message)
    return numbers.tolist()


def _parts(numbers: Sequence[int], lengths: Sequence[int]) -> list[Sequence[int]]:
    ends = [sum(lengths[:count]) for count in range(len(lengths) + 1)]
    return [numbers[begin:end] for begin, end in pairwise(ends)]


def _tuples(numbers: Sequence[int], width: int) -> Iterator[tuple[int, ...]]:
    return zip(*(numbers[column::width] for column in range(width)), strict=True)


def _take(numbers: Iterator[int], count: int) -> Table:
    taken = tuple(islice(numbers, _bounded(count)))
    if len(taken) != count:
        raise _CountWrong(count)
    return taken


def _bounded(count: int) -> int:
    if not 0 <= count <= _MOST:
        raise _CountWrong(count)
    return count
