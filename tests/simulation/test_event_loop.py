"""The event loop of a simulated process."""

import asyncio

import pytest

from simulation.event_loop import SimulatedLoop


class _Time:
    now = 0.0


@pytest.fixture
def time() -> _Time:
    return _Time()


@pytest.fixture
def loop(time: _Time) -> SimulatedLoop:
    return SimulatedLoop(lambda: time.now, "p")  # type: ignore[abstract]


def _run(loop: SimulatedLoop) -> None:
    while loop.has_ready():
        loop.run_one()


def test_callbacks_run_in_the_order_of_their_calls(loop: SimulatedLoop) -> None:
    seen: list[int] = []
    for number in range(3):
        loop.call_soon(seen.append, number)
    _run(loop)
    assert seen == [0, 1, 2]


def test_timers_run_when_they_are_due_in_the_order_of_their_times(loop: SimulatedLoop, time: _Time) -> None:
    seen: list[str] = []
    loop.call_later(2.0, seen.append, "second")
    loop.call_later(1.0, seen.append, "first")
    cancelled = loop.call_later(0.5, seen.append, "cancelled")
    cancelled.cancel()
    assert not loop.has_ready()
    assert loop.next_timer() == 1.0
    time.now = 2.0
    _run(loop)
    assert seen == ["first", "second"]


def test_only_callbacks_that_are_no_timers_are_counted(loop: SimulatedLoop) -> None:
    loop.call_soon(lambda: None)
    loop.call_later(0.0, lambda: None)
    assert loop.has_ready()
    assert [loop.run_one(), loop.run_one()] == [True, False]


def test_tasks_timeouts_and_executors_run_on_virtual_time(loop: SimulatedLoop, time: _Time) -> None:
    async def work() -> str:
        assert await asyncio.to_thread(lambda: 3) == 3
        try:
            async with asyncio.timeout(1.0):
                await asyncio.sleep(5.0)
        except TimeoutError:
            return f"timed out at {loop.time()}"
        return "done"

    task = loop.run(lambda: loop.create_task(work()))
    _run(loop)
    time.now = 1.0
    _run(loop)
    assert task.result() == "timed out at 1.0"


def test_a_killed_loop_calls_nothing_more(loop: SimulatedLoop) -> None:
    seen: list[str] = []
    loop.call_soon(seen.append, "before")
    loop.kill()
    loop.call_soon(seen.append, "after")
    loop.call_later(0.0, seen.append, "a timer")
    assert not loop.has_ready()
    assert seen == []


def test_an_exception_that_nobody_retrieves_is_a_failure(loop: SimulatedLoop) -> None:
    async def fail() -> None:
        raise ValueError("oops")

    loop.run(lambda: loop.create_task(fail()))
    _run(loop)
    assert [failure for failure in loop.failures if "oops" in failure]
