"""Garbage collection: survivors are frozen, cycles are collected."""

import asyncio
import gc
import weakref
from collections.abc import Generator, Iterator
from itertools import count

import pytest

from kvmanager import KVManager, PoolSpec
from services.kvmanager.garbage_collection import freeze_survivors, freezing, run_collections

HOUR = 3600.0


class Cyclic:
    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_objects_that_survive_two_collections_are_frozen() -> None:
    with freeze_survivors():
        kept = [[number] for number in range(100)]
        gc.collect(0)
        assert any(one is kept for one in gc.get_objects())
        gc.collect(1)
        assert not any(one is kept for one in gc.get_objects())
    more = [kept]
    gc.collect(1)
    assert any(one is more for one in gc.get_objects()), "freezing continued after the context"


def test_objects_made_by_a_slice_are_frozen_before_a_collection() -> None:
    def work() -> Generator[None, None, list[int]]:
        large = list(range(1000))
        yield
        return large

    sliced = freezing(work())
    next(sliced)
    with pytest.raises(StopIteration) as end:
        next(sliced)
    assert not any(one is end.value.value for one in gc.get_objects())


@pytest.mark.parametrize(
    ("seconds", "attached", "busy", "collected"),
    [
        (1.0, True, False, False),
        (HOUR, True, False, True),
        (HOUR, True, True, False),
        (24 * HOUR, True, True, True),
        (1.0, False, False, True),
    ],
)
def test_cycles_are_collected_once_an_hour_between_steps_and_when_the_last_engine_detaches(
    seconds: float, attached: bool, busy: bool, collected: bool
) -> None:
    manager = KVManager(epoch=1)
    session = manager.attach(PoolSpec("engine", 1, "model", 16, 8, 0))

    async def run() -> bool:
        clock = count(0.0, seconds)
        task = asyncio.create_task(run_collections(manager, lambda: next(clock), period_seconds=0))
        await asyncio.sleep(0)
        cyclic = weakref.ref(Cyclic())
        gc.freeze()
        if not attached:
            manager.detach(session)
        for _ in range(3):
            session.totals.steps += busy
            await asyncio.sleep(0)
        task.cancel()
        return cyclic() is None

    gc.disable()
    try:
        assert asyncio.run(run()) == collected
    finally:
        gc.enable()
