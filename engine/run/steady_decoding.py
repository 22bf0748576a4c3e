"""Steady decoding on a CPU: each step decodes one token of the same sequences as the step before.

From one step to the next only the tokens change, and each position grows by one. So the input tensors are kept and
changed in place: making new ones takes longer than everything else that the host does for a small step.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from engine.attention.backend import PagedBatch
from engine.schedule.request import Sampling
from engine.schedule.step_plan import PENDING_TOKEN, PromptPart, RowRules, Work

Table = tuple[int, ...]


class Columns(NamedTuple):
    """The work of a step, field by field; see Work."""

    sequence: tuple[int, ...]
    token_ids: tuple[tuple[int, ...], ...]
    start: tuple[int, ...]
    block_table: tuple[Table, ...]
    samples: tuple[bool, ...]
    sampling: tuple[Sampling, ...]
    sample_indices: tuple[tuple[int, ...], ...]
    rules: tuple[RowRules | None, ...]
    logprobs: tuple[int | None, ...]
    to_score: tuple[PromptPart | None, ...]
    candidates: tuple[int, ...]
    proposed: tuple[int, ...]
    later_rules: tuple[tuple[RowRules | None, ...], ...]
    window_tables: tuple[tuple[Table, ...], ...]

    @classmethod
    def of(cls, work: Sequence[Work]) -> "Columns":
        """Return the columns of at least one work."""
        return cls._make(zip(*work, strict=True))

    @property
    def pending(self) -> int:
        """Number of works whose token is sampled by the step before."""
        return self.token_ids.count(PENDING_TOKEN)

    @property
    def decodes(self) -> bool:
        """Whether each work has one token and one sample, and nothing to score."""
        return (
            all(self.samples)
            and set(map(len, self.token_ids)) == {1}
            and set(map(len, self.sample_indices)) == {1}
            and not (any(self.to_score) or any(self.proposed))
        )

    @property
    def has_bare_tokens(self) -> bool:
        """Whether each work has one sample, without rules, scores and candidates."""
        return (
            all(self.samples)
            and set(map(len, self.sample_indices)) == {1}
            and set(self.logprobs) == {None}
            and not (any(self.rules) or any(self.to_score) or any(self.candidates) or any(self.proposed))
        )


class SteadyInputs(NamedTuple):
    """The inputs of the decoder for one step; see Decoder. Its tensors share the memory of the arrays."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    batch: PagedBatch


class SteadyDecoding:
    """Inputs of a step that only decodes. `advance` turns them into the inputs of the next step.

    `inputs` may be used until `advance`, which changes them in place.
    """

    def __init__(self, columns: Columns, inputs: SteadyInputs) -> None:
        """Keep a step's inputs."""
        self.sequences = columns.sequence
        self.inputs = inputs
        self._size = inputs.batch.block_size
        self._same = _constant(columns)
        self._next_starts = _next(columns.start)
        self.tables = columns.block_table
        # Views of memory, and lists: for few rows NumPy's operators take several times as long.
        self._tokens, self._positions = inputs.token_ids.numpy().data, inputs.positions.numpy().data
        self._slots, self._ends = inputs.batch.slots.numpy().data, inputs.batch.ends.numpy().data
        self._slots = self._slots.cast("B").cast("q")  # NumPy calls it a long
        # Rows that begin a block in a step, by the number of steps from this one on, modulo the block size.
        self._crossing: list[list[int]] = [[] for _ in range(self._size)]
        for row, start in enumerate(columns.start):
            self._crossing[-start % self._size].append(row)
        self._steps = 0

    def is_followed_by(self, columns: Columns) -> bool:
        """Return whether a step continues the latest one: same sequences, one position further."""
        return (
            columns.sequence == self.sequences
            and columns.start == self._next_starts
            and _constant(columns) == self._same
            and columns.pending in (0, len(columns.token_ids))
            and set(map(len, columns.token_ids)) == {1}
        )

    def advance(self, columns: Columns, pending: Iterable[int], tables: torch.Tensor | None) -> None:
        """Turn the inputs into those of the next step.

        `pending` are the tokens that the latest step has sampled, for work that has none itself. `tables` are the block
        tables if one has changed.
        """
        starts, self._next_starts = columns.start, _next(columns.start)
        tokens = pending if columns.pending else [token for (token,) in columns.token_ids]
        self._tokens[:] = array("i", tokens)
        self._positions[:] = array("i", starts)
        self._ends[:] = array("i", self._next_starts)
        self._steps += 1
        rows = self._crossing[self._steps % self._size]
        if tables is not None:
            self.inputs = self.inputs._replace(batch=_with_tables(self.inputs.batch, tables))
            # Another block may have taken the place of the last one: its contents were shared.
            rows = [*rows, *[row for row, one in enumerate(columns.block_table) if one is not self.tables[row]]]
        slots = array("q", [one + 1 for one in self._slots])
        for row in rows:
            block, offset = divmod(starts[row], self._size)
            slots[row] = columns.block_table[row][block] * self._size + offset
        self._slots[:] = slots
        self.tables = columns.block_table


def _next(starts: Iterable[int]) -> tuple[int, ...]:
    return tuple([one + 1 for one in starts])


def _constant(columns: Columns) -> tuple[object, ...]:
    """Return what is the same in all steps of steady decoding."""
    return columns.samples, columns.sample_indices, columns.to_score, columns.proposed


def _with_tables(batch: PagedBatch, tables: torch.Tensor) -> PagedBatch:
    return PagedBatch(batch.block_size, batch.fed, batch.slots, batch.first, batch.ends, tables)
