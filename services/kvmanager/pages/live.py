"""Live maps: one for each watched pool. Without watchers, nothing is computed.

A watcher receives the whole map, then the changes at most ten times a second. All watchers of a pool receive the same
bytes; a watcher that is too far behind receives the whole map again.
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
from services.runtime.errors import Overloaded, UnsupportedField
from services.runtime.slices import run_in_slices

# With the browser's drawing time, about the fastest rate that a person can follow.
_TICK_SECONDS = 0.1
# Slots are counted once a second, because this iterates over all sequences.
_TICKS_PER_COUNT = 10
# Messages that are kept for slow watchers: five seconds.
_KEPT_MESSAGES = 50
# Blocks of a whole map in one message: 88 KiB.
_PAGE_BLOCKS = 16384
# 4 MiB of map and 8 MiB of owners, more than a page can show.
_MAX_BLOCKS = 1 << 20
_MAX_WATCHERS = 16
# Latest events that are sent in one tick; earlier ones are skipped, because nobody could read them.
_MAX_EVENTS = 12
_HEARTBEAT_SECONDS = 15.0

log = logging.getLogger("quire.kvmanager")

Messages = AsyncGenerator[bytes, None]


def message(kind: str, value: Any) -> bytes:
    """Encode a server-sent event."""
    return f"event: {kind}\ndata: {json.dumps(value, separators=(',', ':'))}\n\n".encode()


def counts_json(session: Session) -> dict[str, Any]:
    """Return the counts of a pool's blocks and sequences."""
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
        "kinds": [
            {"name": kind.kind_name, "device": kind.device.counts._asdict(), "host": kind.host.counts._asdict()}
            for kind in pool.windows
        ],
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
        "kinds": [
            {"name": kind.name, "device_blocks": kind.device_blocks, "host_blocks": kind.host_blocks}
            for kind in spec.windows
        ],
    }


@dataclass(eq=False)
class _LivePool:
    """The map of one session's pool, and the latest change messages. `version` counts all messages."""

    manager: KVManager
    session: Session
    watchers: int = 0
    version: int = 0
    ended: bool = False
    messages: deque[bytes] = field(default_factory=lambda: deque(maxlen=_KEPT_MESSAGES))

    def __post_init__(self) -> None:
        self._map = self.manager.open_map(self.session)
        self._changed = asyncio.Event()
        self._built = asyncio.Event()
        self._next_event = self.manager.ledger.next_number
        self._counts: dict[str, Any] = {}
        self._ticks = 0
        self._slots: dict[str, int] = {}
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        try:
            await run_in_slices(self._map.building())
            self._built.set()
            while self.manager.is_live(self.session):
                await asyncio.sleep(_TICK_SECONDS)
                await self._tick()
        except Exception:
            log.exception("block map of engine %s failed", self.session.pool.spec.engine_id)
        finally:
            self.ended = True
            self._built.set()
            self._notify()

    def close(self) -> None:
        """Stop following the pool."""
        self.task.cancel()
        self.manager.close_map(self.session, self._map)

    async def _tick(self) -> None:
        self._ticks += 1
        events = self._events()
        changes = await run_in_slices(self._map.updating())
        counts = counts_json(self.session)
        changed: dict[str, Any] = {}
        if events:
            changed["events"] = events
        if counts != self._counts:
            self._counts = changed["counts"] = counts
        for kind, of in enumerate(changes):
            for tier, cells in of._asdict().items():
                if cells:
                    changed[_band(tier, kind)] = b64encode(cells.tobytes()).decode()
        if self._ticks % _TICKS_PER_COUNT == 0 and (slots := self.session.pool.slots()._asdict()) != self._slots:
            self._slots = changed["slots"] = slots
        if changed:
            self._add(changed, changes)

    def _add(self, value: dict[str, Any], changes: list[MapChanges]) -> None:
        self.version += 1
        changed = sum(len(kind.device) + len(kind.host) for kind in changes)
        if changed > max(len(self._map), _PAGE_BLOCKS):
            self.messages.clear()  # the whole map is shorter, and is sent in pages
        else:
            self.messages.append(message("changes", value))
        self._notify()

    def _events(self) -> list[dict[str, Any]]:
        """Return the latest events of this pool since the last tick."""
        ledger, engine_id = self.manager.ledger, self.session.pool.spec.engine_id
        page = ledger.events(max(self._next_event, ledger.next_number - _MAX_EVENTS), _MAX_EVENTS)
        events = [event for event in page.events if event.engine_id == engine_id]
        self._next_event = ledger.next_number
        for event in events:
            if event.change in (PoolChange.WITHHELD, PoolChange.HOST_WITHHELD):
                kinds = [kind.kind_name for kind in self.session.pool.state.kinds]
                for first, last in event.ranges:
                    of_kind = self._map.kinds[kinds.index(event.kind)]
                    of_kind.touch(range(first, last + 1), host=event.change is PoolChange.HOST_WITHHELD)
        return [event_json(event) for event in events]

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def watch(self) -> Messages:
        """Yield the map, then its changes, until the session ends."""
        version = -1
        await self._built.wait()
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
                    yield b": no changes\n\n"

    def _whole(self) -> Iterator[bytes]:
        slots = self.session.pool.slots()._asdict()
        # Cleared, because these counts may be newer than those that the next tick would compare with.
        self._counts, self._slots = {}, {}
        yield message("pool", pool_json(self.session) | {"slots": slots})
        for kind, of in enumerate(self._map.kinds):
            for tier, cells in (("device", of.device), ("host", of.host)):
                for first in range(1, len(cells), _PAGE_BLOCKS):
                    page = b64encode(cells[first : first + _PAGE_BLOCKS].tobytes()).decode()
                    yield message("cells", {"tier": _band(tier, kind), "first": first, "cells": page})
        yield message("drawn", {"version": self.version})


def _band(tier: str, kind: int) -> str:
    """Return the name of the part of the page that shows a tier of a kind of blocks."""
    return f"{tier}-{kind}" if kind else tier


class LiveMaps:
    """The live maps of all watched pools."""

    def __init__(self, manager: KVManager) -> None:
        self._manager = manager
        self._pools: dict[Session, _LivePool] = {}

    @property
    def watchers(self) -> int:
        """Number of watchers."""
        return sum(pool.watchers for pool in self._pools.values())

    async def watch(self, engine_id: str) -> Messages:
        """Yield messages of an engine's pool, and of its successors, until the engine has none.

        Raises UnknownPool, Overloaded if there are too many watchers, and UnsupportedField if the pool is too large.
        """
        session = self._manager.session(engine_id)
        if self.watchers >= _MAX_WATCHERS:
            raise Overloaded(f"{_MAX_WATCHERS} pages are open, which is the maximum")
        with suppress(UnknownPool):
            while True:
                async with aclosing(self._watch(session)) as messages:
                    async for one in messages:
                        yield one
                session = self._manager.session(session.pool.spec.engine_id)
        yield message("gone", {})

    async def _watch(self, session: Session) -> Messages:
        spec = session.pool.spec
        if spec.blocks > _MAX_BLOCKS:
            raise UnsupportedField(
                f"a pool must have at most {_MAX_BLOCKS} blocks to be shown, not {spec.blocks}", "engine"
            )
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
