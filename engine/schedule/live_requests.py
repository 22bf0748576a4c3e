"""Accepts, pins, cancels and fails requests by their ids."""

from collections.abc import Collection, Set
from collections.abc import Sequence as Items
from dataclasses import replace
from math import inf

from engine.errors import ConstraintFailed, EngineUnavailable, InvalidRequest, PinUnavailable, QueueFull, RequestExists
from engine.schedule.endings import RequestEndings
from engine.schedule.pool.pins import PinnedPrefix, Pins, request_of
from engine.schedule.pool.pool_view import PoolView
from engine.schedule.request import Failure, FinishReason, Request
from engine.schedule.request_queue import RequestQueue
from engine.schedule.sequence_group import Group


class LiveRequests:
    """The API for requests and pins. A `draining` engine accepts none."""

    def __init__(self, queue: RequestQueue, view: PoolView, pins: Pins, endings: RequestEndings) -> None:
        self.draining = False
        self.now = 0.0  # as of the latest plan
        self._earliest_deadline = inf  # of all live requests, or earlier
        self._queue = queue
        self._view = view
        self._pins = pins
        self._endings = endings

    def drain(self) -> None:
        """Refuse new requests and pins from now on, and end what nobody waits for."""
        self.draining = True
        for group in self._all():
            if group.request.scratch:
                self._endings.end(group, FinishReason.CANCELLED)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestRefused and changes nothing if it is refused."""
        limits = self._queue.limits
        if self.draining:
            raise EngineUnavailable("the engine is draining")
        if request.request_id in self._queue.by_request:
            raise RequestExists(f"request_id {request.request_id!r} is in use by a live request", "request_id")
        most, field = limits.max_sequences, "beam_search.width" if request.beam_search else "sampling.sample_count"
        least = 0 if request.ended else 1  # `check` refuses requests without a live sample
        if not least <= request.sequences <= most:
            raise InvalidRequest(
                f"{field} must be between 1 and {most} (max_sequences), not {request.sequences}", field
            )
        self._check(request)
        waiting = len(self._queue.waiting) + len(self._queue.admitting)
        if waiting >= limits.max_waiting:
            raise QueueFull(f"the queue is full: {waiting} requests wait, the limit is {limits.max_waiting}")
        try:
            self._add(request)
        except ConstraintFailed as failed:
            raise InvalidRequest(
                f"the generated tokens violate the constraint: {failed}", "samples.generated_token_ids"
            ) from failed

    def _check(self, request: Request) -> None:
        try:
            self._view.capacity.check(request)
        except InvalidRequest as invalid:
            whole = self._view.whole
            replace(self._view.capacity, device_blocks=whole.device_blocks, windows=whole.windows).check(request)
            raise EngineUnavailable(f"{invalid}; others are withheld", invalid.field) from invalid

    def _add(self, request: Request) -> None:
        self._earliest_deadline = min(self._earliest_deadline, inf if request.deadline is None else request.deadline)
        self._queue.add_group(Group.of(request, self._queue.sequence_ids, self._queue.limits.priority_aging))

    def add_scratch(self, request: Request) -> None:
        """Queue a request of the engine's own, which fits into the pool."""
        self._add(request)

    # Pins.

    def pin(self, name: str, token_ids: tuple[int, ...], salt: bytes, now: float) -> PinnedPrefix:
        """Declare a prefix; its whole blocks are then computed and pinned. Repeating a declaration changes nothing.

        The returned prefix changes state later. Raises PinRefused and changes nothing if it is refused.
        """
        if self.draining:
            raise PinUnavailable("the engine is draining")
        if (pin := self._pins.find(name, token_ids, salt)) is None:
            pin = self._pins.declare(name, token_ids, salt)
            self._add(request_of(pin, now))
        return pin

    def unpin(self, name: str) -> None:
        """Remove a pin with the next block step; its blocks stay cached. Raises UnknownPin."""
        self.cancel(self._pins.remove_pin(name).request_id)

    def reset(self, now: float) -> None:
        """Clear the prefix cache with the next block step; pinned prefixes are recomputed and pinned again."""
        self._compute_again(self._pins.reset(), now)

    def _compute_again(self, pins: Items[PinnedPrefix], now: float) -> None:
        for pin in pins:
            self.cancel(pin.request_id)
            self._add(request_of(pin, now))

    # Ending.

    def cancel(self, request_id: str) -> None:
        """End a request; an unknown id is ignored. The next block step frees its blocks."""
        if (group := self._queue.by_request.get(request_id)) is not None:
            self._endings.end(group, FinishReason.CANCELLED)

    def cancel_all(self) -> None:
        """End all live requests. The next block step frees their blocks."""
        for group in self._all():
            self._endings.end(group, FinishReason.CANCELLED)

    def end_sample(self, request_id: str, index: int) -> None:
        """End one sample of a request, as a stop string does. Unknown or finished samples are ignored."""
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
        """Fail a request with an exception raised for it alone; an unknown id is ignored."""
        if (group := self._queue.by_request.get(request_id)) is not None:
            self._endings.fail_with(group, fault)

    def fail_all(self, failure: Failure, detail: str) -> None:
        """End all live requests as failed."""
        for group in self._all():
            self._endings.fail(group, failure, detail)

    def fail_expired(self, now: float) -> None:
        """Fail the requests whose deadline has passed; called for each plan."""
        self.now = now
        if now < self._earliest_deadline:
            return
        live = [group for group in self._all() if group.request.deadline is not None]
        late = [group for group in live if _deadline(group) <= now]
        self._earliest_deadline = min([_deadline(group) for group in live if group not in late], default=inf)
        for group in late:
            if group.stats.scheduled_at is None:
                self._endings.fail(group, Failure.DEADLINE_QUEUED, "deadline exceeded in the queue")
            else:
                self._endings.fail(group, Failure.DEADLINE, "deadline exceeded while running")

    def condemn(self, blocks: Items[Set[int]], now: float, *, reset: bool) -> None:
        """Remove device blocks of each kind from the capacity, because their contents are wrong.

        Pinned prefixes that hold one are computed again; all of them after a `reset`, which clears the prefix cache.
        Requests that no longer fit fail.
        """
        self.withhold(blocks)
        self._compute_again(self._pins.reset() if reset else self._pins.recompute(blocks), now)

    def withhold(self, blocks: Items[Collection[int]]) -> None:
        """Remove withheld device blocks of each kind from the capacity; fail requests that no longer fit."""
        self._view.withhold(blocks)
        for group in self._all():
            if shortage := self._shortage(group.request):
                detail = f"the request can need {shortage} are left: others are withheld or pinned"
                self._endings.fail(group, Failure.BLOCK_MANAGER, detail)

    def _shortage(self, request: Request) -> str:
        """Return the blocks that a request can need and those that are left, of a kind that has too few."""
        # Prefixes that are being computed already count as pinned.
        if request.prefill_only and not request.scratch:
            return self._pins.shortage(request)
        demand = self._view.capacity.shortage(request, request.stopping.max_tokens)
        return f"{demand.name}, but {demand.left}" if demand else ""

    def _all(self) -> list[Group]:
        return list(self._queue.by_request.values())


def _deadline(group: Group) -> float:
    deadline = group.request.deadline
    return inf if deadline is None else deadline
