"""Releases the blocks of sequences."""

from collections.abc import Iterable

from blocks import Free, FreeReason
from engine.schedule.pool.pool_view import PoolView
from engine.schedule.pool.step_builder import StepBuilder
from engine.schedule.request_queue import RequestQueue
from engine.schedule.sequence_group import Sequence


class Releases:
    """Sequences that the next block step frees. They are `release_pending` until then."""

    def __init__(self, queue: RequestQueue, view: PoolView) -> None:
        self._queue = queue
        self._view = view
        self._pending: list[tuple[Sequence, FreeReason]] = []

    @property
    def pending(self) -> list[Sequence]:
        """The sequences that the next block step frees."""
        return [sequence for sequence, _ in self._pending]

    @property
    def any_pending(self) -> bool:
        """Whether the next block step frees sequences."""
        return bool(self._pending)

    def release(self, sequences: Iterable[Sequence], reason: FreeReason) -> None:
        """Free the blocks of sequences with the next block step; drop ended sequences without blocks."""
        for sequence in list(sequences):
            if sequence.table and not sequence.release_pending:
                sequence.release_pending = True
                self._pending.append((sequence, reason))
            elif not sequence.table:
                self._queue.remove_sequence(sequence)

    def write(self, step: StepBuilder) -> None:
        """Add the pending frees to a block step."""
        pending, self._pending = self._pending, []
        for sequence, reason in pending:
            self.free(step, Free(sequence.id, reason), sequence)
            if sequence.group.ended:
                self._view.claims.release_all(sequence.group)

    def free(self, step: StepBuilder, free: Free, sequence: Sequence) -> None:
        """Add one free to a block step immediately."""
        step.frees.append(free)
        self._view.release(sequence)
        sequence.release_pending = False
        sequence.lose_blocks()
        self._queue.remove_sequence(sequence)
