"""The KV manager's part of traces: one span for each time that a traced request holds blocks.

It begins with the grant, and ends when the last of the group's sequences has given its blocks back, which is with the
Step after the request's end, or with its preemption.
"""

from dataclasses import dataclass, field
from typing import Any

from kvmanager import Session
from quire.v1 import kvmanager_pb2 as pb
from services.tracing import NO_SPAN, Span, Tracing

_SWAPS = {pb.STEP_ITEM_SWAP_OUT: "swap out", pb.STEP_ITEM_SWAP_IN: "swap in"}


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

    def applied(self, session: Session, step: pb.Step, result: pb.StepResult) -> None:
        """Take in a Step that was done."""
        engine_id = session.pool.spec.engine_id
        if held := self._engines.get(engine_id):
            self._follow(held, step, result)
            if not held:
                del self._engines[engine_id]
        for index, allocate in enumerate(step.allocates):
            if allocate.trace_parent:
                self._allocated(engine_id, index, step, result)

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

    def _allocated(self, engine_id: str, index: int, step: pb.Step, result: pb.StepResult) -> None:
        if any(one.item == pb.STEP_ITEM_ALLOCATE and one.index == index for one in result.refusals):
            return  # it is asked again, perhaps often: Explain has it all
        allocate, tables = step.allocates[index], result.tables
        place = list(tables.sequences).index(allocate.sequence)
        attributes: dict[str, Any] = {
            "gen_ai.request.id": allocate.request_id,
            "quire.engine": engine_id,
            "quire.kv.granted_blocks": tables.block_counts[place],
            "quire.kv.cached_tokens": tables.cached_tokens[place],
            "quire.kv.prompt_tokens": len(allocate.token_ids),
            "quire.kv.waited_seconds": allocate.waited.ToTimedelta().total_seconds(),
        }
        span = self._tracing.begin("hold blocks", allocate.trace_parent, attributes)
        if span is not NO_SPAN:
            holding = _Holding(allocate.group, span, {allocate.sequence})
            self._engines.setdefault(engine_id, {})[allocate.sequence] = holding

    def _follow(self, held: dict[int, _Holding], step: pb.Step, result: pb.StepResult) -> None:
        for fork in step.forks:
            if (holding := held.get(fork.parent)) is not None:
                held[fork.child] = holding
                holding.sequences.add(fork.child)
        for free in step.frees:
            if free.sequence in held:
                _free(held, free)
        refused = {(one.item, one.index) for one in result.refusals}
        for item, groups in ((pb.STEP_ITEM_SWAP_OUT, step.swap_outs), (pb.STEP_ITEM_SWAP_IN, step.swap_ins)):
            for index, group in enumerate(groups):
                if (item, index) not in refused:
                    for holding in {one for one in held.values() if one.group == group}:
                        holding.span.event(_SWAPS[item])


def _free(held: dict[int, _Holding], free: pb.Free) -> None:
    reason = pb.FreeReason.Name(free.reason).removeprefix("FREE_REASON_").lower()
    attributes: dict[str, Any] = {"quire.kv.sequence": free.sequence, "quire.kv.reason": reason}
    if free.preempted_for_group:
        attributes["quire.kv.preempted_for_group"] = free.preempted_for_group
    held[free.sequence].span.event("preempt" if free.reason == pb.FREE_REASON_PREEMPTED else "free", attributes)
    _give_back(held, free.sequence)


def _give_back(held: dict[int, _Holding], sequence: int, fault: str = "") -> None:
    holding = held.pop(sequence)
    holding.sequences.discard(sequence)
    if not holding.sequences:
        holding.span.end(fault)
