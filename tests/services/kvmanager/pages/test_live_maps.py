"""Live map messages, without a server."""

import asyncio
import json
from contextlib import aclosing
from typing import Any

from blocks import Allocate, Free, FreeReason, Step
from kvmanager import KVManager, PoolSpec
from services.kvmanager.pages.live import LiveMaps, Messages


async def next_counts(messages: Messages) -> dict[str, Any]:
    """Read up to the next message with counts and return them."""
    while True:
        kind, data = (await anext(messages)).decode().split("\n")[:2]
        assert kind.startswith("event: "), "no further message"
        if "counts" in (message := json.loads(data.removeprefix("data: "))):
            counts: dict[str, Any] = message["counts"]
            return counts


def test_a_map_opened_between_two_ticks_receives_a_change_undone_by_the_next() -> None:
    """A change that is undone before the next tick would otherwise not be sent."""

    async def watch() -> None:
        manager = KVManager(1)
        session = manager.attach(PoolSpec("engine", 1, "model", 4, 20))
        live = LiveMaps(manager)
        async with aclosing(live.watch("engine")) as first, aclosing(live.watch("engine")) as second:
            before = [await next_counts(first), await next_counts(first)]
            assert before == [before[0]] * 2, "in the whole map and in the first tick"
            manager.apply(session, Step(1, allocates=[Allocate(1, 1, "request", b"", [1] * 9, 9)]))
            assert (await next_counts(second))["device"]["held"] == 3
            manager.apply(session, Step(2, frees=[Free(1, FreeReason.FINISHED)]))
            assert await next_counts(second) == before[0]

    asyncio.run(asyncio.wait_for(watch(), 60))
