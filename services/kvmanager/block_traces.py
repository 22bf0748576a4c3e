"""The KV manager's part of traces: one span for each time that a traced request holds blocks.

It begins with the grant, and ends when the last of the group's sequences has given its blocks back, which is with the
Step after the request's end, or with its preemption.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from blocks import Allocate, Free, FreeReason, Step, StepItem, TableChange
from kvmanager import AppliedStep, Session
from services.runtime.tracing.spans import NO_SPAN, Span, Tracing

_SWAPS = {StepItem.SWAP_OUT: "swap out", StepItem.SWAP_IN: "swap in"}


@dataclass(eq=False)
class _Holding:
    """A traced group that has blocks."""

    group: int
    span: Span
    sequences: set[int] = field(default_factory=set)


class BlockTraces:
    """Follows the traced groups of all engines through their Steps. Others cost a look at two empty things."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._engines: dict[str, dict[int, _Holding]] = {}  # by engine, then by sequence

    def applied(self, session: Session, step: Step, trace_parents: Mapping[int, str], applied: AppliedStep) -> None:
        """Take in a Step that was done, and its traced allocates' parents by their positions."""
        engine_id = session.pool.spec.engine_id
        if held := self._engines.get(engine_id):
            self._follow(held, step, applied)
            if not held:
                del self._engines[engine_id]
        if trace_parents:
            refused = applied.result.refused
            tables = {table.sequence: table for table in applied.result.tables}
            for index, parent in trace_parents.items():
                if (StepItem.ALLOCATE, index) not in refused:  # else it is asked again: Explain has it all
                    self._allocated(engine_id, step.allocates[index], parent, tables)

    def forget_others(self, session: Session) -> None:
        """End what a session's pool has nothing of any more: all of it where the pool was dropped."""
        held = self._engines.get(session.pool.spec.engine_id, {})
        for sequence in [one for one in held if one not in session.pool.sequences]:
            _give_back(held, sequence, "the pool changed")

    def dropped(self, session: Session) -> None:
        """End what a pool held that was dropped."""
        held = self._engines.pop(session.pool.spec.engine_id, {})
        for sequence in list(held):
            _give_back(held, sequence, "the pool was dropped")

    def _allocated(self, engine_id: str, allocate: Allocate, parent: str, tables: Mapping[int, TableChange]) -> None:
        table = tables[allocate.sequence]
        attributes: dict[str, Any] = {
            "gen_ai.request.id": allocate.request_id,
            "quire.engine": engine_id,
            "quire.kv.granted_blocks": len(table.block_ids),
            "quire.kv.cached_tokens": table.cached_tokens,
            "quire.kv.prompt_tokens": len(allocate.token_ids),
            "quire.kv.waited_seconds": allocate.waited_seconds,
        }
        span = self._tracing.start_span("hold blocks", parent, attributes)
        if span is not NO_SPAN:
            holding = _Holding(allocate.group, span, {allocate.sequence})
            self._engines.setdefault(engine_id, {})[allocate.sequence] = holding

    def _follow(self, held: dict[int, _Holding], step: Step, applied: AppliedStep) -> None:
        for fork in step.forks:
            if (holding := held.get(fork.parent)) is not None:
                held[fork.child] = holding
                holding.sequences.add(fork.child)
        for free in step.frees:
            if free.sequence in held:
                _free(held, free)
        if not step.swap_outs and not step.swap_ins:
            return
        refused = applied.result.refused
        groups = {holding.group: holding for holding in held.values()}
        for item, swapped in ((StepItem.SWAP_OUT, step.swap_outs), (StepItem.SWAP_IN, step.swap_ins)):
            for index, group in enumerate(swapped):
                if (item, index) not in refused and group in groups:
                    groups[group].span.add_event(_SWAPS[item])


def _free(held: dict[int, _Holding], free: Free) -> None:
    reason = free.reason.name.lower()
    attributes: dict[str, Any] = {"quire.kv.sequence": free.sequence, "quire.kv.reason": reason}
    if free.preempted_for_group:
        attributes["quire.kv.preempted_for_group"] = free.preempted_for_group
    held[free.sequence].span.add_event("preempt" if free.reason is FreeReason.PREEMPTED else "free", attributes)
    _give_back(held, free.sequence)


def _give_back(held: dict[int, _Holding], sequence: int, fault: str = "") -> None:
    holding = held.pop(sequence)
    holding.sequences.discard(sequence)
    if not holding.sequences:
        holding.span.end(fault)
