"""Live map messages, without a server."""

import asyncio
import json
from array import array
from base64 import b64decode
from contextlib import aclosing
from typing import Any

from blocks import Allocate, Free, FreeReason, Step
from kvmanager import KVManager, PoolSpec
from kvmanager.observe.block_map import BlockState, Cell
from services.kvmanager.pages.live import LiveMaps, Messages


async def next_with(field: str, messages: Messages) -> dict[str, Any]:
    """Read up to the next message with a field and return the message."""
    while True:
        kind, data = (await anext(messages)).decode().split("\n")[:2]
        assert kind.startswith("event: "), "no further message"
        message: dict[str, Any] = json.loads(data.removeprefix("data: "))
        if field in message:
            return message


async def next_counts(messages: Messages) -> dict[str, Any]:
    counts: dict[str, Any] = (await next_with("counts", messages))["counts"]
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


def test_a_block_that_an_audit_withholds_changes_on_the_map() -> None:
    async def watch() -> None:
        manager = KVManager(1)
        session = manager.attach(PoolSpec("engine", 1, "model", 4, 20))
        live = LiveMaps(manager)
        async with aclosing(live.watch("engine")) as messages:
            await next_counts(messages)
            await next_counts(messages)
            session.pool.withhold([7], [])
            manager.ledger.withheld("engine", [7], host=False)
            message = await next_with("device", messages)
            (block, packed), cells = array("I", b64decode(message["device"])), session.pool.device
            assert (block, Cell.unpack(packed).state) == (7, BlockState.WITHHELD)
            assert message["counts"]["device"]["withheld"] == cells.total - cells.available == 1

    asyncio.run(asyncio.wait_for(watch(), 60))
