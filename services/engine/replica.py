"""The engine's mirror of its pool: the KV manager's own core, fed with the Steps that were answered.

Same Steps, same pool: whatever the manager has, this has too, so it can tell a manager that lost the pool, or never
had it, all about it. It lives where the stream lives, beside the engine's thread. Where the manager answers otherwise,
the books here are right: the engine is told what they say, and so is the manager.
"""

from collections import deque
from dataclasses import replace

import kvmanager
from engine import blocks

_FREE_REASONS = {reason: kvmanager.FreeReason[reason.name] for reason in blocks.FreeReason}


class PoolDiffers(Exception):
    """The KV manager answered otherwise than the same Steps always do. `own` is the answer that they lead to."""

    def __init__(self, own: blocks.StepResult) -> None:
        super().__init__(f"the KV manager's answer to step {own.step} is not what its Steps lead to")
        self.own = own


class Replica:
    """A pool as its engine knows it, and the Steps that were not answered yet."""

    def __init__(self, spec: kvmanager.PoolSpec) -> None:
        """Start with an empty pool."""
        self.spec = spec
        self._pool = kvmanager.Pool(spec)
        self._unanswered: deque[kvmanager.Step] = deque()

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

    def sent(self, step: blocks.Step) -> None:
        """Remember a Step until its answer comes."""
        self._unanswered.append(core_step(step))

    def answered(self, result: blocks.StepResult) -> None:
        """Do what the KV manager did. Raises PoolDiffers, with the answer to believe, when that gives another one."""
        self._pool.withhold(result.withheld_blocks, result.host_withheld_blocks)
        own = engine_result(self._pool.apply(self._unanswered.popleft()))
        if _compared(own) != _compared(result):
            raise PoolDiffers(own)

    def settle(self) -> kvmanager.PoolReport:
        """Describe the pool as the engine has it now, when the answers under way will never come.

        What was freed, forked or computed is so whether the manager heard of it or not; what was asked for was not
        granted, and nothing was moved, because nobody made the copies.
        """
        while self._unanswered:
            step = self._unanswered.popleft()
            self._pool.apply(replace(step, swap_outs=(), swap_ins=(), extends=(), allocates=()))
        if not self._pool.last_step:
            return kvmanager.PoolReport()
        return kvmanager.report_of(self._pool)


def _compared(result: blocks.StepResult) -> tuple[object, ...]:
    tables = [(change.sequence, list(change.block_ids)) for change in result.tables]
    return result.step, result.available_blocks, result.available_host_blocks, tables


def engine_result(result: kvmanager.StepResult) -> blocks.StepResult:
    """Return an answer of the KV manager's core as one for the engine."""
    return blocks.StepResult(
        step=result.step,
        refusals=[blocks.Refusal(blocks.StepItem[one.item.name], one.position, one.detail) for one in result.refusals],
        tables=[blocks.TableChange(*change) for change in result.tables],
        copies=[blocks.Copy(*copy) for copy in result.copies],
        available_blocks=result.device.available,
        available_host_blocks=result.host.available,
        device_to_host=tuple(blocks.Copy(*copy) for copy in result.device_to_host),
        host_to_device=tuple(blocks.Copy(*copy) for copy in result.host_to_device),
        withheld_blocks=result.withheld,
        host_withheld_blocks=result.host_withheld,
    )


def _core_pin(change: blocks.PinChange) -> kvmanager.PinChange:
    match change:
        case blocks.Pin():
            return kvmanager.Pin(*change)
        case blocks.Unpin():
            return kvmanager.Unpin(*change)
        case blocks.Reset():
            return kvmanager.Reset()


def core_step(step: blocks.Step) -> kvmanager.Step:
    """Return a Step of the engine as one of the KV manager's core."""
    return kvmanager.Step(
        step=step.step,
        commits=[kvmanager.Commit(*item) for item in step.commits],
        pins=list(map(_core_pin, step.pins)),
        forks=[kvmanager.Fork(*item) for item in step.forks],
        frees=[
            kvmanager.Free(free.sequence, _FREE_REASONS[free.reason], free.preempted_for_group) for free in step.frees
        ],
        swap_outs=list(step.swap_outs),
        swap_ins=list(step.swap_ins),
        extends=[kvmanager.Extend(*item) for item in step.extends],
        allocates=[kvmanager.Allocate(*item) for item in step.allocates],
        lengths=list(step.lengths),
    )
