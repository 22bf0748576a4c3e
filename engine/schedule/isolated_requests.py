"""Steps for requests that may crash the engine: each runs with no other request in its batch.

A gateway marks a request as isolated if two engines in a row were lost with it before it gained a token. It stays
isolated until its first token (a beam search: until its end), and for at most `isolation_seconds`. Meanwhile the other
running groups keep their blocks but take part in no step. At most one isolated group holds blocks, and other groups run
for at least one step between two isolated ones.

An isolated group is computed only after its Started was taken for delivery. If the process then crashes, the delivered
Started identifies the request.
"""

from engine.schedule.request_queue import RequestQueue
from engine.schedule.sequence_group import Group


class IsolatedRequests:
    """Selects the running groups for the next step."""

    def __init__(self, queue: RequestQueue) -> None:
        self._queue = queue
        self._delivered: set[Group] = set()

    def batch(self, now: float, *, step_in_flight: bool) -> list[Group]:
        """Return one isolated group, or all groups that are not isolated.

        The others also run if the isolated group lacks blocks and no block step is in flight: they hold the blocks it
        needs.
        """
        queue = self._queue
        if not queue.holds_isolated:
            return queue.running
        for group in queue.running:
            self._end_expired_isolation(group, now)
        chosen = next((group for group in queue.running if group in self._delivered and group.isolated), None)
        if chosen is None or (_lacks_blocks(chosen) and not step_in_flight):
            return [group for group in queue.running if not group.isolated]
        if chosen.isolated_since is None:
            chosen.isolated_since = now
        return [chosen]

    def on_outputs_taken(self) -> None:
        """Record that outputs were taken for delivery, including the Started of each running group."""
        queue = self._queue
        self._delivered = {group for group in queue.running if group.isolated} if queue.holds_isolated else set()

    def on_token(self, group: Group) -> None:
        """End the isolation of a group at its first token; a beam search stays isolated."""
        group.isolated = group.beams is not None

    def _end_expired_isolation(self, group: Group, now: float) -> None:
        begun = group.isolated_since
        if begun is not None and now - begun >= self._queue.limits.isolation_seconds:
            group.isolated = False


def _lacks_blocks(group: Group) -> bool:
    return any(sequence.computed >= sequence.room for sequence in group.active)
