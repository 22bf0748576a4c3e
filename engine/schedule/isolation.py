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


def runnable(queue: RequestQueue, now: float, *, step_in_flight: bool) -> list[Group]:
    """Return the groups that may take part in the next step: one isolated group, or all that are not isolated.

    The others also run if the isolated group lacks blocks and no block step is in flight: they hold what it needs.
    """
    if not queue.holds_isolated:
        return queue.running
    for group in queue.running:
        group.end_isolation_after(queue.limits.isolation_seconds, now)
    chosen = next((group for group in queue.running if group.isolated and group.start_taken), None)
    if chosen is None or (_lacks_blocks(chosen) and not step_in_flight):
        return [group for group in queue.running if not group.isolated]
    chosen.begin_isolation(now)
    return [chosen]


def on_outputs_taken(queue: RequestQueue) -> None:
    """Record that outputs were taken for delivery, including the Started of each running group."""
    if queue.holds_isolated:
        for group in queue.running:
            group.mark_start_taken()


def _lacks_blocks(group: Group) -> bool:
    return any(sequence.lacks_room for sequence in group.active)
