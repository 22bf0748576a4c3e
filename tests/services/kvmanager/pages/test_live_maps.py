"""What is told to whoever looks at a pool's map, without a server."""

import asyncio
import json
from contextlib import aclosing
from typing import Any

from blocks import Allocate, Free, FreeReason, Step
from kvmanager import KVManager, PoolSpec
from services.kvmanager.pages.live import LiveMaps, Messages


async def next_counts(messages: Messages) -> dict[str, Any]:
    """Read on to the next message that has counts, and return them."""
    while True:
        kind, data = (await anext(messages)).decode().split("\n")[:2]
        assert kind.startswith("event: "), "nothing more is told"
        if "counts" in (said := json.loads(data.removeprefix("data: "))):
            counts: dict[str, Any] = said["counts"]
            return counts


def test_a_map_opened_between_two_ticks_receives_a_short_first_interval() -> None:
    """What was so before and is so again at the next tick would not be told otherwise."""

    async def look() -> None:
        manager = KVManager(1)
        session = manager.attach(PoolSpec("engine", 1, "model", 4, 20))
        live = LiveMaps(manager)
        async with aclosing(live.watch("engine")) as first, aclosing(live.watch("engine")) as second:
            before = [await next_counts(first), await next_counts(first)]
            assert before == [before[0]] * 2, "of the whole map, and of the first tick"
            manager.apply(session, Step(1, allocates=[Allocate(1, 1, "request", b"", [1] * 9, 9)]))
            assert (await next_counts(second))["device"]["held"] == 3
            manager.apply(session, Step(2, frees=[Free(1, FreeReason.FINISHED)]))
            assert await next_counts(second) == before[0]

    asyncio.run(asyncio.wait_for(look(), 60))
