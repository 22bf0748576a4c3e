"""Steps for requests that may end the engine: each of them is computed with no other request in its batch.

A gateway marks a request as isolated when two engines were lost with it, one after the other, before it gained a token.
It is isolated until its first token is there (a beam search, which has no token of its own before, until its end), and
for at most `isolation_seconds`. Meanwhile the other running groups keep their blocks and take part in no step. One
group at a time is isolated and holds blocks, and others run for at least a step between two of them.

An isolated group is computed only after its Started has been taken for delivery. So whoever delivers that before the
next turn has said which request the engine works on, should the process end there.
"""

from engine.schedule.request_queue import RequestQueue
from engine.schedule.sequence_group import Group


class IsolatedRequests:
    """Chooses the running groups that the next step may consist of."""

    def __init__(self, queue: RequestQueue) -> None:
        self._queue = queue
        self._delivered: set[Group] = set()

    def batch(self, now: float, *, step_in_flight: bool) -> list[Group]:
        """Return one isolated group, or the groups that are not.

        The others also run if the isolated group lacks blocks and no Step is in flight: they hold the blocks it needs.
        """
        queue = self._queue
        if not queue.holds_isolated:
            return queue.running
        for group in queue.running:
            self._release_in_time(group, now)
        chosen = next((group for group in queue.running if group in self._delivered and group.isolated), None)
        if chosen is None or (_lacks_blocks(chosen) and not step_in_flight):
            return [group for group in queue.running if not group.isolated]
        if chosen.isolated_since is None:
            chosen.isolated_since = now
        return [chosen]

    def on_outputs_taken(self) -> None:
        """The outputs so far are taken for delivery, and Started of each group that runs among them."""
        self._delivered = {group for group in self._queue.running if group.isolated}

    def on_token(self, group: Group) -> None:
        """Let an isolated group that has its first token run with the others; a search goes on alone to its end."""
        group.isolated = group.beams is not None

    def _release_in_time(self, group: Group, now: float) -> None:
        begun = group.isolated_since
        if begun is not None and now - begun >= self._queue.limits.isolation_seconds:
            group.isolated = False


def _lacks_blocks(group: Group) -> bool:
    return any(sequence.computed >= sequence.room for sequence in group.active)
