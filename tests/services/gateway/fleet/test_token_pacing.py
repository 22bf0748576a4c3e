"""Tokens that are held for messages of several, on a virtual clock."""

import asyncio
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.v1 import decoding_pb2, engine_pb2
from services.gateway.fleet.request_stream import Event, RequestStream
from services.gateway.fleet.token_pacing import MAX_HOLD_SECONDS, TokenPacing
from simulation.event_loop import SimulatedLoop

STARTED = engine_pb2.RequestStarted(request_id="r")
FINISHED = engine_pb2.RequestFinished(request_id="r")
# Clocks are sums of floats.
ROUNDING = 1e-9


def tokens(*token_ids: int, sample: int = 0, ended: bool = False, logprobs: bool = False) -> engine_pb2.SampleTokens:
    scores = [decoding_pb2.TokenLogprobs(logprob=-one) for one in token_ids] if logprobs else ()
    end = engine_pb2.SampleEnd(reason=decoding_pb2.FINISH_REASON_LENGTH) if ended else None
    return engine_pb2.SampleTokens(request_id="r", sample=sample, token_ids=token_ids, end=end, logprobs=scores)


class VirtualClient:
    """One stream, and its reader, which notes when it reads which events. `busy`: the loop never waits."""

    def __init__(self, interval: int = 1, *, receives: bool = False, deadline: float | None = None) -> None:
        self.now = 100.0
        self.busy = False
        self._waited = 0.0
        self.loop = SimulatedLoop(lambda: self.now, "p")  # type: ignore[abstract]
        self.pacing = TokenPacing(interval, lambda: self._waited)
        self.stream = RequestStream(engine_pb2.Submission(request_id="r"), 1000, pacing=self.pacing)
        if receives:
            self.stream.receiver = self._receive
        self.seen: list[tuple[float, Event]] = []
        self.error: BaseException | None = None
        self.loop.run(lambda: self.loop.create_task(self._read(deadline)))
        self._settle()

    def put(self, *events: Event) -> None:
        """Put the events of a step."""

        def step() -> None:
            self.pacing.on_step()
            for event in events:
                self.stream.put(event)

        self.loop.run(step)
        self._settle()

    def call(self, function: Callable[[], None]) -> None:
        self.loop.run(function)
        self._settle()

    def wait(self, seconds: float) -> None:
        """Let this time pass, with all timers that are due until then."""
        until = self.now + seconds
        while (due := self.loop.next_timer()) is not None and due <= until:
            self._pass(due)
        self._pass(until)

    def fall_behind(self) -> None:
        """Let the loop be busy for longer than the time over which that is measured."""
        self.busy = True
        for _ in range(3):
            self.wait(0.06)
            self.loop.run(self.pacing.on_step)

    def messages(self) -> list[list[int]]:
        return [list(one.token_ids) for _, one in self.seen if isinstance(one, engine_pb2.SampleTokens)]

    async def _read(self, deadline: float | None) -> None:
        try:
            while True:
                for event in await self.stream.next_events(deadline):
                    self.seen.append((self.now, event))
        except Exception as error:
            self.error = error

    def _receive(self, event: engine_pb2.SampleTokens) -> bool:
        if event.HasField("end"):
            return False
        self.seen.append((self.now, event))
        return True

    def _pass(self, until: float) -> None:
        if not self.busy:
            self._waited += until - self.now
        self.now = until
        self._settle()

    def _settle(self) -> None:
        while self.loop.has_ready():
            self.loop.run_one()


@pytest.fixture(params=[False, True], ids=["read", "received"])
def receives(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_each_token_is_a_message_of_its_own_by_default(receives: bool) -> None:
    client = VirtualClient(receives=receives)
    for number in range(5):
        client.put(tokens(number))
        client.wait(0.001)
    assert client.messages() == [[0], [1], [2], [3], [4]]


def test_an_interval_sends_that_many_tokens_in_one_message_but_the_first_at_once(receives: bool) -> None:
    client = VirtualClient(3, receives=receives)
    for number in range(8):
        client.put(tokens(number))
        client.wait(0.001)
    assert client.messages() == [[0], [1, 2, 3], [4, 5, 6]]
    client.put(tokens(8, ended=True), FINISHED)
    assert client.messages()[-1] == [7, 8], "the end holds nothing back"
    assert client.seen[-1][1] == FINISHED


def test_held_tokens_are_sent_when_the_message_before_is_50_ms_old(receives: bool) -> None:
    client = VirtualClient(100, receives=receives)
    begun = client.now
    for number in range(6):
        client.put(tokens(number))
        client.wait(0.02)
    assert client.messages() == [[0], [1, 2], [3, 4, 5]]
    assert [when - begun for when, _ in client.seen] == pytest.approx([0, 0.05, 0.1])


def test_tokens_of_a_slow_engine_are_not_held(receives: bool) -> None:
    client = VirtualClient(100, receives=receives)
    for number in range(4):
        client.put(tokens(number))
        assert client.messages()[-1] == [number]
        client.wait(0.05)


def test_tokens_are_merged_while_the_loop_never_waits_and_no_longer(receives: bool) -> None:
    client = VirtualClient(receives=receives)
    client.put(tokens(0))
    client.fall_behind()
    for number in range(1, 6):
        client.put(tokens(number))
        client.wait(0.02)
    client.wait(0.05)
    assert client.messages() == [[0], [1], [2, 3], [4, 5]]
    client.busy = False
    for number in range(6, 12):
        client.wait(0.06)
        client.put(tokens(number))
    for number in range(12, 15):
        client.wait(0.01)
        client.put(tokens(number))
    assert client.messages()[4:] == [[number] for number in range(6, 15)]


def test_a_loop_that_waits_half_of_the_time_is_not_behind() -> None:
    client = VirtualClient()
    for number in range(30):
        client.put(tokens(number))
        client.busy = not client.busy
        client.wait(0.01)
    assert client.messages() == [[number] for number in range(30)]


def test_samples_are_held_each_with_its_tokens_and_log_probabilities() -> None:
    client = VirtualClient(2)
    client.put(tokens(0))
    client.put(tokens(1, logprobs=True), tokens(9, sample=1))
    client.put(tokens(2, logprobs=True))
    first, second, other = (one for _, one in client.seen)
    assert (first, other) == (tokens(0), tokens(9, sample=1))
    assert second == tokens(1, 2, logprobs=True)


def test_other_events_take_held_tokens_with_them() -> None:
    client = VirtualClient(100)
    client.put(tokens(0))
    client.put(tokens(1))
    client.put(STARTED)
    assert [one for _, one in client.seen] == [tokens(0), tokens(1), STARTED]
    client.wait(1.0)
    assert client.loop.next_timer() is None, "nothing is held"


def test_a_lost_engine_and_a_deadline_lose_no_held_tokens() -> None:
    lost, late = VirtualClient(100), VirtualClient(100, deadline=100.01)
    for client in (lost, late):
        client.put(tokens(0))
        client.put(tokens(1))
    lost.call(lost.stream.disconnect)
    late.wait(0.01)
    for client in (lost, late):
        assert client.messages() == [[0], [1]]
    assert isinstance(late.error, TimeoutError)


def test_the_end_of_one_of_several_samples_is_not_held(receives: bool) -> None:
    client = VirtualClient(100, receives=receives)
    client.put(tokens(0))
    client.put(tokens(1, ended=True))
    assert client.messages() == [[0], [1]]


def test_a_reader_that_comes_later_waits_for_held_tokens_until_they_are_due() -> None:
    client = VirtualClient(100, deadline=100.0)
    assert isinstance(client.error, TimeoutError), "there is no reader any more"
    stream = RequestStream(engine_pb2.Submission(request_id="r"), 1000, pacing=client.pacing)
    client.call(lambda: stream.put(tokens(0)))
    first = client.loop.run(lambda: client.loop.create_task(stream.next_events(None)))
    client.call(lambda: None)
    client.call(lambda: stream.put(tokens(1)))
    second = client.loop.run(lambda: client.loop.create_task(stream.next_events(None)))
    client.wait(0.04)
    assert first.result() == [tokens(0)]
    assert not second.done()
    client.wait(0.02)
    assert second.result() == [tokens(1)]


def test_nothing_is_held_after_the_deadline() -> None:
    client = VirtualClient(100, deadline=100.0)
    assert isinstance(client.error, TimeoutError)
    client.put(tokens(0))
    client.call(client.stream._take_unread)
    client.put(tokens(1))
    late = client.loop.run(lambda: client.loop.create_task(client.stream.next_events(100.0)))
    client.call(lambda: None)
    assert late.result() == [tokens(1)]


def test_a_closed_stream_holds_nothing() -> None:
    client = VirtualClient(100, receives=True)
    client.put(tokens(0))
    client.put(tokens(1))
    client.call(client.stream.close)
    client.wait(1.0)
    assert client.messages() == [[0]]


STEPS = st.lists(st.tuples(st.sampled_from([0.0, 0.001, 0.01, 0.03, 0.07]), st.booleans()), min_size=1, max_size=30)


@given(STEPS, st.integers(1, 5), st.booleans())
def test_tokens_keep_their_order_and_none_is_held_for_more_than_50_ms(
    steps: Sequence[tuple[float, bool]], interval: int, receives: bool
) -> None:
    client, arrivals = VirtualClient(interval, receives=receives), list[float]()
    for number, (gap, busy) in enumerate(steps):
        client.busy = busy
        client.wait(gap)
        arrivals.append(client.now)
        last = number == len(steps) - 1
        client.put(tokens(number, ended=last), *([FINISHED] if last else []))
    sent = [token for message in client.messages() for token in message]
    assert sent == list(range(len(steps))), "in order, all of them, and at the end nothing is held"
    times = [when for when, one in client.seen if isinstance(one, engine_pb2.SampleTokens) for _ in one.token_ids]
    held = [then - arrived for then, arrived in zip(times, arrivals, strict=True)]
    assert held[0] == held[-1] == 0
    assert max(held) <= MAX_HOLD_SECONDS + ROUNDING
    assert all(len(one) <= interval for one in client.messages()[:-1]) or any(busy for _, busy in steps)


def test_streams_are_handed_out_each_when_it_is_due() -> None:
    client = VirtualClient(100, receives=True)
    other = RequestStream(engine_pb2.Submission(request_id="o"), 1000, pacing=client.pacing)
    seen: list[tuple[float, list[int]]] = []

    def receive(event: engine_pb2.SampleTokens) -> bool:
        seen.append((client.now, list(event.token_ids)))
        return True

    other.receiver = receive
    client.call(lambda: client.loop.create_task(_read(other)))  # type: ignore[arg-type, return-value]
    begun = client.now
    client.call(lambda: other.put(tokens(0)))
    client.wait(0.02)
    client.put(tokens(0))
    client.put(tokens(1))
    client.call(lambda: other.put(tokens(1)))  # held last, and due first
    client.wait(0.1)
    assert [when - begun for when, _ in seen] == pytest.approx([0, 0.05])
    assert [when - begun for when, _ in client.seen] == pytest.approx([0.02, 0.07])
    assert [after - before for before, after in pairwise(when for when, _ in seen)] == pytest.approx([MAX_HOLD_SECONDS])


async def _read(stream: RequestStream) -> None:
    while True:
        await stream.next_events(None)


def test_a_loop_that_does_not_measure_its_waiting_is_never_behind() -> None:
    async def work() -> bool:
        pacing = TokenPacing()
        pacing.on_step()
        return pacing.active

    assert not asyncio.run(work())
