"""Live maps: one for each pool that somebody looks at, whoever looks. Nothing is computed while nobody does.

A watcher gets the whole map, then what changes, ten times a second at most. All watchers of a pool get the same bytes;
who is too far behind gets the whole map anew.
"""

import asyncio
import json
import logging
from base64 import b64encode
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

from kvmanager import KVManager, MapChanges, PoolChange, Session, UnknownPool
from services.kvmanager.renderer import event_json
from services.kvmanager.slices import run_in_slices
from services.runtime.errors import Overloaded, UnsupportedField

# Together with what a browser needs to draw it, about what an eye can follow.
_TICK_SECONDS = 0.1
# Waste is summed over all sequences at once: once a second.
_TICKS_PER_SUM = 10
# Messages that are kept for watchers who are behind: five seconds.
_KEPT_MESSAGES = 50
# Of a whole map, in one message: 88 KiB.
_PAGE_BLOCKS = 16384
# 4 MiB of a map and 8 MiB of owners, more than a page can show.
_MOST_BLOCKS = 1 << 20
_MOST_WATCHERS = 16
# Events of one tick that are told; what came before them is skipped, as nobody could read it.
_MOST_EVENTS = 12
_HEARTBEAT_SECONDS = 15.0

log = logging.getLogger("quire.kvmanager")

Messages = AsyncGenerator[bytes, None]


def message(kind: str, value: Any) -> bytes:
    """Write one server-sent event."""
    return f"event: {kind}\ndata: {json.dumps(value, separators=(',', ':'))}\n\n".encode()


def counts_json(session: Session) -> dict[str, Any]:
    """Count a pool's blocks and sequences."""
    pool = session.pool
    return {
        "device": pool.device.counts._asdict(),
        "host": pool.host.counts._asdict(),
        "shared": pool.device.shared,
        "saved": pool.device.saved,
        "pinned": pool.pinned_blocks,
        "sequences": len(pool.sequences),
        "groups": len(pool.groups),
        "connected": session.connected,
    }


def pool_json(session: Session) -> dict[str, Any]:
    """Describe a pool."""
    spec = session.pool.spec
    return {
        "engine": spec.engine_id,
        "model": spec.model,
        "block_size": spec.block_size,
        "device_blocks": spec.device_blocks,
        "host_blocks": spec.host_blocks,
        "counts": counts_json(session),
    }


@dataclass(eq=False)
class _LivePool:
    """The map of one session's pool, and what has changed of late. `version` counts messages."""

    manager: KVManager
    session: Session
    watchers: int = 0
    version: int = 0
    ended: bool = False
    messages: deque[bytes] = field(default_factory=lambda: deque(maxlen=_KEPT_MESSAGES))

    def __post_init__(self) -> None:
        self._map = self.manager.open_map(self.session)
        self._changed = asyncio.Event()
        self._drawn = asyncio.Event()
        self._next_event = self.manager.ledger.next_number
        self._counts: dict[str, Any] = {}
        self._ticks = 0
        self._slots: dict[str, int] = {}
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            await run_in_slices(self._map.building())
            self._drawn.set()
            while self.manager.is_live(self.session):
                await asyncio.sleep(_TICK_SECONDS)
                await self._tick()
        except Exception:
            log.exception("the block map of engine %s ends", self.session.pool.spec.engine_id)
        finally:
            self.ended = True
            self._drawn.set()
            self._tell()

    def close(self) -> None:
        """Follow the pool no longer."""
        self.task.cancel()
        self.manager.close_map(self.session, self._map)

    async def _tick(self) -> None:
        self._ticks += 1
        events = self._events()
        changes = await run_in_slices(self._map.updating())
        counts = counts_json(self.session)
        news: dict[str, Any] = {}
        if events:
            news["events"] = events
        if counts != self._counts:
            self._counts = news["counts"] = counts
        for tier, cells in changes._asdict().items():
            if cells:
                news[tier] = b64encode(cells.tobytes()).decode()
        if self._ticks % _TICKS_PER_SUM == 0 and (slots := self.session.pool.slots()._asdict()) != self._slots:
            self._slots = news["slots"] = slots
        if news:
            self._add(news, changes)

    def _add(self, news: dict[str, Any], changes: MapChanges) -> None:
        self.version += 1
        changed, whole = (len(one.device) + len(one.host) for one in (changes, self._map))
        if changed > max(whole, _PAGE_BLOCKS):
            self.messages.clear()  # the whole map is shorter, and comes in pages
        else:
            self.messages.append(message("changes", news))
        self._tell()

    def _events(self) -> list[dict[str, Any]]:
        """Return what the ledger has had of this pool since the last tick, or the last of it."""
        ledger, engine_id = self.manager.ledger, self.session.pool.spec.engine_id
        page = ledger.events(max(self._next_event, ledger.next_number - _MOST_EVENTS), _MOST_EVENTS)
        events = [event for event in page.events if event.engine_id == engine_id]
        self._next_event = ledger.next_number
        for event in events:
            if event.change in (PoolChange.WITHHELD, PoolChange.HOST_WITHHELD):
                for first, last in event.ranges:
                    self._map.touch(range(first, last + 1), host=event.change is PoolChange.HOST_WITHHELD)
        return [event_json(event) for event in events]

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def watch(self) -> Messages:
        """Yield the map, then what changes, until the pool is no longer this one."""
        version = -1
        await self._drawn.wait()
        while not self.ended:
            changed = self._changed
            if version < self.version - len(self.messages):
                version = self.version
                for one in self._whole():
                    yield one
            elif version < self.version:
                version += 1
                yield self.messages[version - self.version - 1]
            else:
                try:
                    await asyncio.wait_for(changed.wait(), _HEARTBEAT_SECONDS)
                except TimeoutError:
                    yield b": nothing has changed\n\n"

    def _whole(self) -> Iterator[bytes]:
        slots = self.session.pool.slots()._asdict()
        # The next ticks tell what is other than they told before; what is told here may be other than that.
        self._counts, self._slots = {}, {}
        yield message("pool", pool_json(self.session) | {"slots": slots})
        for tier, cells in (("device", self._map.device), ("host", self._map.host)):
            for first in range(1, len(cells), _PAGE_BLOCKS):
                page = b64encode(cells[first : first + _PAGE_BLOCKS].tobytes()).decode()
                yield message("cells", {"tier": tier, "first": first, "cells": page})
        yield message("drawn", {"version": self.version})


class LiveMaps:
    """The live maps of all pools that somebody looks at."""

    def __init__(self, manager: KVManager) -> None:
        self._manager = manager
        self._pools: dict[Session, _LivePool] = {}

    @property
    def watchers(self) -> int:
        """How many look."""
        return sum(pool.watchers for pool in self._pools.values())

    async def watch(self, engine_id: str) -> Messages:
        """Yield messages of an engine's pool, and of the one that replaces it, until it has none.

        Raises UnknownPool; Overloaded where too many look; UnsupportedField for a pool that is too large to be shown.
        """
        session = self._manager.session(engine_id)
        if self.watchers >= _MOST_WATCHERS:
            raise Overloaded(f"{_MOST_WATCHERS} pages are being shown already")
        with suppress(UnknownPool):
            while True:
                async with aclosing(self._watch(session)) as messages:
                    async for one in messages:
                        yield one
                session = self._manager.session(session.pool.spec.engine_id)
        yield message("gone", {})

    async def _watch(self, session: Session) -> Messages:
        spec = session.pool.spec
        if spec.device_blocks + spec.host_blocks > _MOST_BLOCKS:
            fault = f"a pool of {spec.device_blocks + spec.host_blocks} blocks is not shown, {_MOST_BLOCKS} at most"
            raise UnsupportedField(fault, "engine")
        pool = self._pools.get(session)
        if pool is None:
            pool = self._pools[session] = _LivePool(self._manager, session)
        pool.watchers += 1
        try:
            async with aclosing(pool.watch()) as messages:
                async for one in messages:
                    yield one
        finally:
            pool.watchers -= 1
            if not pool.watchers:
                del self._pools[session]
                pool.close()
