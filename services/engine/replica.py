"""The engine's replica of its pool: the KV manager's own core, fed with the Steps that were answered.

Same Steps, same pool: whatever the manager has, this has too, so it can describe the pool to a manager that lost it,
or never had it. It lives where the stream lives, beside the engine's thread. Where the manager answers otherwise,
the books here are right: the engine is sent what they say, and so is the manager.
"""

from collections import deque
from dataclasses import replace

import kvmanager
from blocks import Step, StepResult


class PoolDiverged(Exception):
    """The KV manager answered otherwise than the same Steps always do. `own` is the answer that they lead to."""

    def __init__(self, own: StepResult) -> None:
        super().__init__(f"the KV manager's answer to step {own.step} is not what its Steps lead to")
        self.own = own


class Replica:
    """A pool as its engine knows it, and the Steps that were not answered yet."""

    def __init__(self, spec: kvmanager.PoolSpec) -> None:
        """Start with an empty pool."""
        self.spec = spec
        self._pool = kvmanager.Pool(spec)
        self._unanswered: deque[Step] = deque()

    @property
    def available_blocks(self) -> int:
        """Blocks that can be handed out."""
        return self._pool.device.available

    @property
    def available_host_blocks(self) -> int:
        """Host blocks that can be handed out."""
        return self._pool.host.available

    @property
    def pins(self) -> frozenset[str]:
        """The pins that hold blocks."""
        return frozenset(self._pool.state.pins)

    def add_in_flight(self, step: Step) -> None:
        """Remember a Step until its answer comes."""
        self._unanswered.append(step)

    def apply_result(self, result: StepResult) -> None:
        """Do what the KV manager did. Raises PoolDiverged, with the answer to believe, when that gives another one."""
        self._pool.withhold(result.withheld_blocks, result.host_withheld_blocks)
        own = self._pool.apply(self._unanswered.popleft()).result
        if _compared(own) != _compared(result):
            raise PoolDiverged(own)

    def report(self) -> kvmanager.PoolReport:
        """Describe the pool as the engine has it now, when the answers under way will never come.

        What was freed, forked or computed is so whether the manager received it or not; what was asked for was not
        granted, and nothing was moved, because nobody made the copies.
        """
        while self._unanswered:
            step = self._unanswered.popleft()
            self._pool.apply(replace(step, swap_outs=(), swap_ins=(), extends=(), allocates=()))
        if not self._pool.last_step:
            return kvmanager.PoolReport()
        return kvmanager.report_of(self._pool)


def _compared(result: StepResult) -> tuple[object, ...]:
    tables = [(change.sequence, list(change.block_ids)) for change in result.tables]
    return result.step, result.available_blocks, result.available_host_blocks, tables
