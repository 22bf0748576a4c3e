"""The driver with a client in the same event loop, which answers after a while."""

import asyncio
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from services.loadgen.clients.target import RequestFailed
from services.loadgen.driver import Driver
from services.loadgen.records import Record
from services.loadgen.workload.arrivals import Arrivals, ClosedLoop, Random, TraceTimes
from services.loadgen.workload.load import Bounds, Load
from services.loadgen.workload.prompts import Prompt, length
from services.loadgen.workload.workloads import Session
from tests.services.loadgen.sessions import Sessions, session

pytestmark = pytest.mark.anyio

ANSWER_SECONDS = 0.02
UNBOUNDED = Bounds()


class Answering:
    """Answers each request with all its tokens at once, or fails those of one length."""

    def __init__(self, clock: Callable[[], float], failing: int = -1) -> None:
        self._clock = clock
        self._failing = failing
        self.running = self.most = self.answered = 0

    def prepare(self, prompt: Prompt, output_tokens: int) -> tuple[int, int]:
        return length(prompt), output_tokens

    async def send(self, request: Any, record: Record) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(ANSWER_SECONDS)
            self.answered += 1
            if request[0] == self._failing:
                raise RequestFailed("UNAVAILABLE", "draining", 2.0)
            record.add_tokens(request[1], self._clock())
        finally:
            self.running -= 1

    async def close(self) -> None:
        pass


async def run(
    arrivals: Arrivals,
    *sessions: Session,
    bounds: Bounds = UNBOUNDED,
    failing: int = -1,
    cancel_after: float | None = None,
    seconds_of_answer: float | None = None,
) -> tuple[list[Record], Answering, Driver]:
    """Run a load; with `seconds_of_answer`, on a clock that advances by this time with each answer."""
    begun = time.monotonic()

    def clock() -> float:
        return time.monotonic() - begun if seconds_of_answer is None else client.answered * seconds_of_answer

    client = Answering(clock, failing)
    driver = Driver(client, Load(Sessions(*sessions), arrivals, bounds), (0, 1), clock)
    task = asyncio.create_task(driver.run())
    if cancel_after is not None:
        await asyncio.sleep(cancel_after)
        task.cancel()
    await asyncio.gather(task, return_exceptions=cancel_after is not None)
    return sorted(driver.records, key=lambda record: record.sent), client, driver


async def test_a_closed_loop_runs_all_sessions_at_its_concurrency() -> None:
    records, client, driver = await run(ClosedLoop(3), *(session(1) for _ in range(10)))
    assert client.most == 3
    assert [record.number for record in records] == list(range(10))
    assert all(record.completed and record.output_tokens == 3 for record in records)
    assert driver.progress == (10, 10, 0, 30)


@pytest.mark.parametrize("arrivals", [ClosedLoop(4), TraceTimes(), Random(50.0)])
async def test_calls_of_a_session_run_in_order_and_none_before_the_last_has_ended(arrivals: Arrivals) -> None:
    records, _, _ = await run(arrivals, *(session(4) for _ in range(4)))
    for number in range(4):
        own = [record for record in records if record.session == number]
        assert [record.number for record in own] == [4 * number + place for place in range(4)]
        assert all(one.ended <= following.sent for one, following in pairwise(own))


async def test_no_call_of_a_trace_starts_before_its_time() -> None:
    records, _, _ = await run(TraceTimes(speedup=2.0), session(2, start=0.1, gap=0.2), session(1))
    assert [(record.session, record.number) for record in records] == [(0, 0), (1, 1), (1, 2)]
    assert [record.due for record in records[:2]] == [0.0, 0.05]
    assert records[2].due >= 0.15
    assert all(record.sent >= record.due for record in records)


async def test_a_limit_delays_arrivals_and_records_hold_the_delay() -> None:
    records, client, _ = await run(Random(float("inf"), concurrency=2), *(session(1) for _ in range(6)))
    assert client.most == 2
    assert records[-1].sent - records[-1].due >= 1.9 * ANSWER_SECONDS


async def test_no_request_is_sent_after_the_duration_of_a_run() -> None:
    sessions = [session(100) for _ in range(2)]
    for arrivals in (ClosedLoop(2), TraceTimes()):
        records, _, _ = await run(arrivals, *sessions, bounds=Bounds(seconds=0.2), seconds_of_answer=0.01)
        assert 20 <= len(records) <= 22
        assert all(record.due < 0.2 for record in records)


async def test_a_failure_is_recorded_and_the_run_continues() -> None:
    records, _, driver = await run(ClosedLoop(1), session(2), session(1, tokens=9), session(1), failing=9)
    assert [record.status for record in records] == ["completed", "completed", "UNAVAILABLE", "completed"]
    assert (records[2].message, records[2].retry_after) == ("draining", 2.0)
    assert driver.progress.failed == 1


async def test_a_cancelled_run_keeps_ended_requests_and_cancels_the_rest() -> None:
    records, client, driver = await run(ClosedLoop(2), *(session(1) for _ in range(1000)), cancel_after=0.1)
    assert 2 <= len(records) < 1000
    assert all(record.completed for record in records)
    assert client.running == 0
    assert driver.progress.sent == driver.progress.ended
