"""Ends requests in any state."""

from blocks import FreeReason
from engine.errors import BlockManagerBroken, ConstraintFailed
from engine.schedule.outputs import Finished, Outputs
from engine.schedule.pool.pins import Pins
from engine.schedule.pool.releases import Releases
from engine.schedule.request import Failure, FinishReason
from engine.schedule.request_queue import RequestQueue
from engine.schedule.sequence_group import Group, Sequence

_FREE_REASONS = {
    FinishReason.STOP: FreeReason.FINISHED,
    FinishReason.LENGTH: FreeReason.FINISHED,
    FinishReason.CANCELLED: FreeReason.CANCELLED,
    FinishReason.FAILED: FreeReason.FAILED,
    FinishReason.PRUNED: FreeReason.PRUNED,
}


class RequestEndings:
    """Ends groups and samples, and releases their blocks."""

    def __init__(self, queue: RequestQueue, releases: Releases, pins: Pins, outputs: Outputs) -> None:
        self._queue = queue
        self._releases = releases
        self._pins = pins
        self._outputs = outputs
        self._faults: list[tuple[Group, Exception]] = []  # failed groups and their exceptions

    def end(self, group: Group, reason: FinishReason) -> None:
        """End all live samples of a request."""
        for member in group.live:
            member.end(reason)
        self.close(group)

    def fail(self, group: Group, failure: Failure, detail: str, fault: Exception | None = None) -> None:
        """End a request as failed."""
        group.fail(failure, detail, fault)
        self._queue.totals.count_failure(failure)
        self.end(group, FinishReason.FAILED)

    def fail_with(self, group: Group, fault: Exception) -> None:
        """Fail a request with an exception raised for it alone. No effect if it has ended."""
        if self._queue.by_request.get(group.request.request_id) is not group:
            return
        if isinstance(fault, ConstraintFailed):
            detail = f"the output cannot continue under its constraint: {fault}"
            self.fail(group, Failure.CONSTRAINT, detail)
        else:
            detail = f"internal error in this request: {type(fault).__name__}: {fault}"
            self.fail(group, Failure.REQUEST, detail, fault)

    def record_fault(self, group: Group, fault: Exception) -> None:
        """Record an exception raised for one request; `fail_faulty` fails it. Raises BlockManagerBroken again."""
        if isinstance(fault, BlockManagerBroken):
            raise fault
        self._faults.append((group, fault))

    def fail_faulty(self) -> bool:
        """Fail the requests with recorded exceptions; return whether there were any.

        Called at the end of a step, because later work of the step may belong to the same group.
        """
        faults, self._faults = self._faults, []
        for group, fault in faults:
            self.fail_with(group, fault)
        return bool(faults)

    def release_sample(self, member: Sequence) -> None:
        """Release the blocks of a finished sample. An unforked trunk keeps them, because other samples fork from it."""
        group = member.group
        if member.finish is not None and not group.ended and (group.forked or member is not group.trunk):
            self._releases.release([member], _FREE_REASONS[member.finish])

    def close(self, group: Group) -> None:
        """Output the end of a request and release its blocks."""
        if group.beams and not group.answers:
            group.answer(group.members[0].finish or FinishReason.FAILED, self._queue.sequence_ids)
        group.stats.end(len(group.blocks))
        if group.request.prefill_only:
            self._pins.on_request_end(group)
        else:
            self._outputs.emit(Finished(group.request.request_id, group))
        if not self._queue.end(group):
            return  # its allocation is in flight: `Scheduler.apply` releases the blocks
        for member in list(group.members):
            assert member.finish is not None, "it has ended"
            self._releases.release([member], _FREE_REASONS[member.finish])
