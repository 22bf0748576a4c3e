"""Trace spans of the KV manager: one span for each time that a traced request holds blocks.

A span begins with the allocate of a group and ends when its last sequence is freed, which is in the block step after
the request's end, or at its preemption.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from blocks import Allocate, Free, FreeReason, Step, StepItem, TableChange
from kvmanager import AppliedStep, Session
from services.runtime.tracing.spans import NO_SPAN, Span, Tracing

_SWAPS = {StepItem.SWAP_OUT: "swap out", StepItem.SWAP_IN: "swap in"}


@dataclass(eq=False)
class _TracedGroup:
    """A traced group that holds blocks."""

    id: int
    span: Span
    sequences: set[int] = field(default_factory=set)


class BlockTraces:
    """Follows the traced groups of all engines. Block steps without traced groups cost two lookups in empty dicts."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._engines: dict[str, dict[int, _TracedGroup]] = {}  # by engine, then by sequence

    def on_step(self, session: Session, step: Step, trace_parents: Mapping[int, str], applied: AppliedStep) -> None:
        """Receive an applied block step, and the trace parents of its traced allocates by position."""
        engine_id = session.pool.spec.engine_id
        if held := self._engines.get(engine_id):
            self._follow(held, step, applied)
            if not held:
                del self._engines[engine_id]
        if trace_parents:
            refused = applied.result.refused
            tables = {table.sequence: table for table in applied.result.tables}
            for index, parent in trace_parents.items():
                if (StepItem.ALLOCATE, index) not in refused:  # refused allocates are repeated; Explain lists them
                    self._allocated(engine_id, step.allocates[index], parent, tables)

    def end_missing(self, session: Session) -> None:
        """End the spans of sequences that are missing from a session's new pool."""
        held = self._engines.get(session.pool.spec.engine_id, {})
        for sequence in [one for one in held if one not in session.pool.sequences]:
            _release(held, sequence, "the pool changed")

    def on_detach(self, session: Session) -> None:
        """End all spans of a dropped pool."""
        held = self._engines.pop(session.pool.spec.engine_id, {})
        for sequence in list(held):
            _release(held, sequence, "the pool was dropped")

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
            group = _TracedGroup(allocate.group, span, {allocate.sequence})
            self._engines.setdefault(engine_id, {})[allocate.sequence] = group

    def _follow(self, held: dict[int, _TracedGroup], step: Step, applied: AppliedStep) -> None:
        for fork in step.forks:
            if (group := held.get(fork.parent)) is not None:
                held[fork.child] = group
                group.sequences.add(fork.child)
        for free in step.frees:
            if free.sequence in held:
                _free(held, free)
        if not step.swap_outs and not step.swap_ins:
            return
        refused = applied.result.refused
        groups = {group.id: group for group in held.values()}
        for item, swapped in ((StepItem.SWAP_OUT, step.swap_outs), (StepItem.SWAP_IN, step.swap_ins)):
            for index, group_id in enumerate(swapped):
                if (item, index) not in refused and group_id in groups:
                    groups[group_id].span.add_event(_SWAPS[item])


def _free(held: dict[int, _TracedGroup], free: Free) -> None:
    reason = free.reason.name.lower()
    attributes: dict[str, Any] = {"quire.kv.sequence": free.sequence, "quire.kv.reason": reason}
    if free.preempted_for_group:
        attributes["quire.kv.preempted_for_group"] = free.preempted_for_group
    held[free.sequence].span.add_event("preempt" if free.reason is FreeReason.PREEMPTED else "free", attributes)
    _release(held, free.sequence)


def _release(held: dict[int, _TracedGroup], sequence: int, fault: str = "") -> None:
    group = held.pop(sequence)
    group.sequences.discard(sequence)
    if not group.sequences:
        group.span.end(fault)
