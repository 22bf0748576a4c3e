"""KV events of one engine: the stream, what follows the pool, and what publishes."""

import logging
import os
import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from kvmanager import PoolSpec
from services.engine.events.event_stream import EventStream, beat
from services.engine.events.origins import OriginFields
from services.engine.events.pool_events import Follow, PoolEvents
from services.engine.events.settings import PUBLISHED, ZERO, EventSettings
from services.engine.observer import EventStats
from services.runtime.settings import InvalidSetting

if TYPE_CHECKING:
    from services.engine.events.zeromq.publisher import EventPublisher

_NANOSECONDS_OF_A_MICROSECOND = 1000
_KEY_BYTES = 32  # of the digests of salts: each process has its own

log = logging.getLogger("quire.engine")


class EngineEvents:
    """The events of an engine's pool. Belongs to the event loop."""

    def __init__(self, settings: EventSettings, started_ns: int) -> None:
        """Number batches from the start, in nanoseconds since 1970, or from 0.

        Raises InvalidSetting if they cannot be published.
        """
        epoch = 0 if settings.kv_events_numbers == ZERO else started_ns // _NANOSECONDS_OF_A_MICROSECOND
        self.stream = EventStream(epoch, time.time, settings.kv_events_history)
        self._salts = os.urandom(_KEY_BYTES) if settings.kv_events_salts == PUBLISHED else None
        self._publisher = _publisher(settings)

    @property
    def stats(self) -> EventStats:
        """What was published, and to whom."""
        return EventStats(self.stream.stats, self._publisher.stats if self._publisher else None)

    async def bind(self) -> None:
        """Listen. Raises AddressUnavailable."""
        if self._publisher:
            await self._publisher.bind()
            replay = self._publisher.replay_address or "nowhere"
            where = self._publisher.address, replay, self._publisher.protection
            log.info(
                "KV events are published at %s and replayed at %s; they contain the token ids of prompts, %s", *where
            )

    def follow(self, adopted: Mapping[bytes, OriginFields]) -> Follow:
        """Return what follows the engine's pool. `adopted` has the origins of keys that the pool has already."""
        return partial(PoolEvents, stream=self.stream, adopted=adopted, salts=self._salts)

    def begin(self, spec: PoolSpec) -> None:
        """Send what is published from now on, and answer requests for replays. After `bind`."""
        if self._publisher:
            from services.engine.events.zeromq.publisher import EventSource

            self._publisher.begin(self.stream, EventSource(spec.engine_id, spec.model, spec.block_size, spec.windows))

    async def beat(self, seconds: float) -> None:
        """Publish a heartbeat whenever nothing was published for `seconds`, until cancelled."""
        await beat(self.stream, seconds)

    async def finish(self) -> None:
        """Publish that no block is left, at a planned end, and close."""
        if self._publisher:
            await self._publisher.finish(self.stream)

    async def close(self) -> None:
        """Close the sockets."""
        if self._publisher:
            await self._publisher.close()


def engine_events(settings: EventSettings, started_ns: int) -> EngineEvents | None:
    """Return an engine's events, None if nobody may follow them. Raises InvalidSetting."""
    return EngineEvents(settings, started_ns) if settings.has_events else None


def _publisher(settings: EventSettings) -> "EventPublisher | None":
    """Return the publisher, if it has an address. Raises InvalidSetting."""
    if not settings.kv_events_listen:
        return None
    try:
        from services.engine.events.zeromq.publisher import EventPublisher
    except ImportError as error:
        needed = "install the extra `routers` of quire"
        raise InvalidSetting(f"kv_events_listen needs pyzmq and msgspec: {needed} ({error})") from error
    return EventPublisher(settings)
