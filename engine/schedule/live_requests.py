"""Requests as those outside the engine see them: submitted, pinned, cancelled, failed."""

from engine.errors import ConstraintFailed, EngineUnavailable, InvalidRequest, PinUnavailable, QueueFull, RequestExists
from engine.schedule.endings import RequestEndings
from engine.schedule.pool.pins import PinnedPrefix, Pins, request_of
from engine.schedule.pool.pool_view import PoolView
from engine.schedule.request import Failure, FinishReason, Request
from engine.schedule.request_queue import RequestQueue
from engine.schedule.sequence_group import Group


class LiveRequests:
    """Takes requests and pins in, and ends them by their ids. An engine that is `draining` takes none."""

    def __init__(self, queue: RequestQueue, view: PoolView, pins: Pins, endings: RequestEndings) -> None:
        """Begin without requests."""
        self.draining = False
        self._queue = queue
        self._view = view
        self._pins = pins
        self._endings = endings

    def drain(self) -> None:
        """Refuse new requests and pins from now on."""
        self.draining = True

    def submit(self, request: Request) -> None:
        """Queue a request. Raises a RequestRefused, and changes nothing, when it cannot be taken."""
        limits = self._queue.limits
        if self.draining:
            raise EngineUnavailable("the engine is draining")
        if request.request_id in self._queue.by_request:
            raise RequestExists(f"request_id {request.request_id!r} is live", "request_id")
        most, field = limits.max_sequences, "beam_search.width" if request.beam_search else "sampling.sample_count"
        least = 0 if request.ended else 1  # that nothing is left of it is another fault
        if not least <= request.sequences <= most:
            raise InvalidRequest(f"{field} is {request.sequences}, this engine runs 1 to {most} sequences", field)
        self._view.capacity.check(request)
        waiting = len(self._queue.waiting) + len(self._queue.admitting)
        if waiting >= limits.max_waiting:
            raise QueueFull(f"{waiting} requests wait already, which is the limit")
        try:
            self._add(request)
        except ConstraintFailed as failed:
            raise InvalidRequest(
                f"what was generated cannot go on in the constraint: {failed}", "samples.generated_token_ids"
            ) from failed

    def _add(self, request: Request) -> None:
        self._queue.add_group(Group.of(request, self._queue.sequence_ids, self._queue.limits.priority_aging))

    # Pins.

    def pin(self, name: str, token_ids: tuple[int, ...], salt: bytes, now: float) -> PinnedPrefix:
        """Declare a prefix, whose whole blocks are then computed and pinned; doing so again changes nothing.

        Return it; its state changes. Raises a PinRefused, and changes nothing, when it cannot be taken.
        """
        if self.draining:
            raise PinUnavailable("the engine is draining")
        if (pin := self._pins.find(name, token_ids, salt)) is None:
            pin = self._pins.declare(name, token_ids, salt)
            self._add(request_of(pin, now))
        return pin

    def unpin(self, name: str) -> None:
        """Remove a pin with the next Step; its blocks stay cached. Raises UnknownPin."""
        self.cancel(self._pins.remove_pin(name).request_id)

    def reset(self, now: float) -> None:
        """Forget the prefix cache with the next Step; what is pinned is computed anew, and pinned again."""
        for pin in self._pins.reset():
            self.cancel(pin.request_id)
            self._add(request_of(pin, now))

    # Ends.

    def cancel(self, request_id: str) -> None:
        """End a request; an unknown id is ignored. Its blocks go back with the next Step."""
        if (group := self._queue.by_request.get(request_id)) is not None:
            self._endings.end(group, FinishReason.CANCELLED)

    def cancel_all(self) -> None:
        """End every live request. Their blocks go back with the next Step."""
        for group in self._all():
            self._endings.end(group, FinishReason.CANCELLED)

    def end_sample(self, request_id: str, index: int) -> None:
        """End one sample of a request, as a stop does; what is unknown or has ended is ignored."""
        group = self._queue.by_request.get(request_id)
        if group is None or group.beams or not 0 <= index < len(group.members):
            return
        member = group.members[index]
        if member.finish is not None:
            return
        member.end(FinishReason.STOP)
        if group.ended:
            self._endings.close(group)
        elif group.id not in self._queue.admitting:
            self._endings.release_sample(member)
            if not any(other.table for other in group.members):
                group.restart_from_trunk()

    def fail(self, request_id: str, fault: Exception) -> None:
        """End a request for what was raised for it alone; an unknown id is ignored."""
        if (group := self._queue.by_request.get(request_id)) is not None:
            self._endings.fail_with(group, fault)

    def fail_all(self, failure: Failure, detail: str) -> None:
        """End every live request as failed."""
        for group in self._all():
            self._endings.fail(group, failure, detail)

    def fail_expired(self, now: float) -> None:
        """End the requests whose deadline is over."""
        live = self._queue.by_request.values()
        late = [one for one in live if one.request.deadline is not None and one.request.deadline <= now]
        for group in late:
            if group.stats.scheduled_at is None:
                self._endings.fail(group, Failure.DEADLINE_QUEUED, "its time was over in the queue")
            else:
                self._endings.fail(group, Failure.DEADLINE, "its time was over while it ran")

    def withhold(self, blocks: int) -> None:
        """Go on without blocks that an audit took out; requests that can never fit any more fail."""
        self._view.withhold(blocks)
        capacity = self._view.capacity
        for group in self._all():
            # What is being computed to be pinned is counted as pinned already.
            needed = 0 if group.request.prefill_only else capacity.max_blocks(group.request)
            if needed > (left := self._view.capacity.unpinned_blocks):
                detail = f"it can need {needed} blocks, but {left} are left: others are withheld or pinned"
                self._endings.fail(group, Failure.BLOCK_MANAGER, detail)

    def _all(self) -> list[Group]:
        return list(self._queue.by_request.values())
