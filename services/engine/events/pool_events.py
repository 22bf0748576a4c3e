"""The events of a pool: what its replica reports goes to the stream."""

from collections.abc import Callable, Mapping, Sequence

from blocks import Refusal, Step
from kvmanager import PoolState
from services.engine.events.announcements import Announcements
from services.engine.events.event_stream import EventStream
from services.engine.events.origins import OriginFields


class PoolEvents:
    """Follows a pool, and publishes what each block step changes in its keys."""

    def __init__(
        self, state: PoolState, stream: EventStream, adopted: Mapping[bytes, OriginFields], *, salts: bytes | None
    ) -> None:
        """Publish the keys that the pool has already, and answer requests for snapshots from now on.

        `adopted` and `salts` are those of Announcements.
        """
        self.announcements = Announcements(state, adopted, salts=salts)
        self._stream = stream
        stream.snapshot = self.announcements.snapshot
        for changes in self.announcements.snapshot():
            stream.publish(changes)

    def before(self, step: Step) -> None:
        """Record what a block step that is applied next commits to."""
        self.announcements.before(step)

    def applied(self, step: Step, refusals: Sequence[Refusal]) -> None:
        """Record what the block step has committed, except for the refused items."""
        self.announcements.applied(step, refusals)

    def publish(self) -> None:
        """Publish what has changed since the last call, if anything has."""
        if changes := self.announcements.changes():
            self._stream.publish(changes)


# Begins to follow a pool.
Follow = Callable[[PoolState], PoolEvents]
