"""The engine's end of a link: its queue is merged and bounded."""

import asyncio
from collections.abc import Callable

import pytest

from quire.v1 import engine_pb2
from services.engine.gateway_link import GatewayLink, Heartbeat
from services.runtime.errors import SlowClient

pytestmark = pytest.mark.anyio


def output(*token_ids: int) -> engine_pb2.StepOutput:
    return engine_pb2.StepOutput(tokens=[engine_pb2.SampleTokens(request_id="r", token_ids=token_ids)])


async def test_outputs_of_several_steps_are_merged() -> None:
    link = GatewayLink()
    link.put(output(1))
    link.put(output(2))
    merged = await link.get()
    assert merged is not None
    assert [list(one.token_ids) for one in merged.tokens] == [[1], [2]]


async def test_a_blocked_write_is_cancelled_when_the_queue_exceeds_its_limit() -> None:
    link, size = GatewayLink(max_bytes=100), output(*range(20)).ByteSize()
    loop = asyncio.get_running_loop()
    for _ in range(100 // size + 1):
        loop.call_soon(link.put, output(*range(20)))
    with pytest.raises(SlowClient, match="more than 100 bytes of output are queued"), link.cancel_on_overrun():
        await loop.create_future()  # a write that never ends


async def test_a_single_output_may_exceed_the_limit() -> None:
    link = GatewayLink(max_bytes=10)
    link.put(output(*range(100)))
    assert await link.get() == output(*range(100))


async def test_the_limit_counts_from_the_last_get() -> None:
    link = GatewayLink(max_bytes=100)
    with link.cancel_on_overrun():
        for _ in range(50):
            link.put(output(*range(20)))
            link.put(output(1))
            assert await link.get() is not None


async def test_another_cancellation_is_not_replaced() -> None:
    async def write() -> None:
        with GatewayLink().cancel_on_overrun():
            await asyncio.get_running_loop().create_future()

    task = asyncio.create_task(write())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_on_sent_calls_back_after_all_queued_output_was_sent() -> None:
    link, order = GatewayLink(), list[str]()
    link.put(output(1))
    link.on_sent(lambda: order.append("called back"))
    await link.get()
    order.append("read")
    await asyncio.sleep(0)
    order.append("sent")
    again = asyncio.create_task(link.get())
    await asyncio.sleep(0)
    link.on_sent(lambda: order.append("called back at once"))
    again.cancel()
    assert order == ["read", "sent", "called back", "called back at once"]


class Timers:
    """The timers of an event loop whose clock the test sets."""

    def __init__(self) -> None:
        self.now = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Callable[[], None], /) -> asyncio.TimerHandle:
        self._timer = asyncio.TimerHandle(self.now + delay, callback, (), self._loop)
        return self._timer

    def advance(self, to: float) -> None:
        """Run the callbacks that are due until then."""
        while (timer := self._timer) is not None and not timer.cancelled() and timer.when() <= to:
            self.now = timer.when()
            timer._run()
        self.now = to


async def test_a_heartbeat_is_due_once_a_wait_for_output_is_long_enough() -> None:
    timers, beats = Timers(), list[float]()
    heartbeat = Heartbeat(1.0, lambda: beats.append(timers.now), timers)
    timers.advance(10.5)  # no wait, as during a write
    for end in (11.0, 11.9, 12.8):  # outputs come sooner
        with heartbeat:
            timers.advance(end)
    assert beats == []
    for end in (13.9, 16.0):
        with heartbeat:
            timers.advance(end)
    assert beats == [pytest.approx(13.8), pytest.approx(14.9)]
    heartbeat.cancel()
    timers.advance(20.0)
    assert len(beats) == 2
