from contextlib import suppress

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.gateway.access.admission import AdmissionControl, AdmissionSlot, Limiter
from services.gateway.access.token_bound import Sequences
from services.runtime.errors import Overloaded

PLENTY = 1_000_000


def refusal(admission: AdmissionControl, now: float, tokens: int = 1, model: str = "m") -> Overloaded:
    with pytest.raises(Overloaded) as caught:
        admission.admit(model, tokens, now)
    return caught.value


def seconds(refused: Overloaded) -> float:
    assert refused.retry_seconds is not None
    return refused.retry_seconds


# Limits


def test_a_full_limit_admits_again_below_the_low_watermark() -> None:
    admission = AdmissionControl(10, PLENTY)
    slots = [admission.admit("m", 1, 0.0) for _ in range(10)]
    assert "10 sequences are in flight, the limit is 10" in str(refusal(admission, 1.0))
    slots.pop().release(2.0)
    refusal(admission, 2.0)
    slots.pop().release(3.0)
    assert admission.requests == 8
    for _ in range(2):
        admission.admit("m", 1, 3.0)
    refusal(admission, 3.0)


def test_each_sequence_of_a_request_counts() -> None:
    admission = AdmissionControl(10, PLENTY)
    slot = admission.admit("m", 1, 0.0, Sequences(8, "sampling.sample_count"))
    with pytest.raises(Overloaded, match=r"8 sequences are in flight, the limit is 10, and beam_search.width is 3"):
        admission.admit("m", 1, 0.0, Sequences(3, "beam_search.width"))
    slot.release(1.0)
    assert admission.requests == 0
    admission.admit("m", 1, 1.0, Sequences(11, "beam_search.width"))  # alone


def test_requests_are_limited_over_all_models_and_tokens_for_each_model() -> None:
    admission = AdmissionControl(3, 100)
    admission.admit("a", 100, 0.0)
    assert "100 tokens are queued, the limit is 100" in str(refusal(admission, 0.0, 1, "a"))
    admission.admit("b", 100, 0.0)
    admission.admit("c", 100, 0.0)
    assert "3 sequences are in flight" in str(refusal(admission, 0.0, 1, "d"))
    assert [admission.queued_tokens(model) for model in "abcd"] == [100, 100, 100, 0]


def test_tokens_are_queued_until_the_start_and_sequences_held_until_the_end() -> None:
    admission = AdmissionControl(2, 100)
    slot = admission.admit("m", 90, 0.0)
    refusal(admission, 0.0, 20)
    slot.on_started(1.0)
    assert (admission.queued_tokens("m"), admission.requests, slot.queued) == (0, 1, False)
    admission.admit("m", 100, 1.0)
    refusal(admission, 1.0, 1)
    slot.release(2.0)
    slot.release(2.0)
    assert (admission.queued_tokens("m"), admission.requests) == (100, 1)


def test_the_upper_bound_of_tokens_is_replaced_once_they_are_known() -> None:
    admission = AdmissionControl(10, 100)
    slot = admission.admit("m", 90, 0.0)
    refusal(admission, 0.0, 20)
    slot.set_tokens(30, 0.1)
    admission.admit("m", 20, 0.1)
    slot.release(0.2)
    slot.set_tokens(50, 0.3)
    assert admission.queued_tokens("m") == 20


# Retry times


def full(limit: int) -> tuple[AdmissionControl, list[AdmissionSlot]]:
    admission = AdmissionControl(limit, PLENTY)
    return admission, [admission.admit("m", 1, 0.0) for _ in range(limit)]


def overload(
    admission: AdmissionControl, slots: list[AdmissionSlot], seconds_each: float, departures: int, now: float
) -> float:
    """Release the oldest slots one after the other, and fill up after each; return the time then."""
    for _ in range(departures):
        with suppress(Overloaded):
            while True:
                slots.append(admission.admit("m", 1, now))
        now += seconds_each
        slots.pop(0).release(now)
    return now


@pytest.mark.parametrize("rate", [0.5, 40.0])
def test_the_retry_time_is_the_distance_to_the_low_watermark_over_throughput(rate: float) -> None:
    admission, slots = full(100)
    now = overload(admission, slots, 1 / rate, 100, 0.0)
    while admission.requests > 81:
        assert seconds(refusal(admission, now)) == pytest.approx((admission.requests - 80) / rate, rel=0.02)
        now = overload(admission, slots, 1 / rate, 1, now)


def test_the_retry_time_of_queued_tokens_counts_tokens() -> None:
    admission = AdmissionControl(PLENTY, 1000)
    slots = [admission.admit("m", 100, 0.0) for _ in range(10)]
    now = 0.0
    for _ in range(15):  # 100 tokens every 2 seconds
        refusal(admission, now, 1)
        for _ in range(2):
            now += 2.0
            slots.pop(0).on_started(now)
        slots += [admission.admit("m", 100, now) for _ in range(2)]
    assert seconds(refusal(admission, now, 1)) == pytest.approx(200 / 50, rel=0.02)
    assert seconds(refusal(admission, now, 700)) == pytest.approx(700 / 50, rel=0.02)


def test_time_without_rejections_does_not_count_for_throughput() -> None:
    admission, slots = full(100)
    now = overload(admission, slots, 0.1, 100, 0.0)
    for slot in slots:
        slot.release(now)
    for _ in range(50):  # one request a minute
        now += 60
        admission.admit("m", 1, now).release(now + 1)
    slots = [admission.admit("m", 1, now) for _ in range(100)]
    assert 1.0 < seconds(refusal(admission, now)) <= 20 * 0.1


def test_before_the_first_departure_the_retry_time_grows_with_the_age() -> None:
    admission, _ = full(100)
    estimates = [seconds(refusal(admission, now)) for now in (0.0, 1.0, 10.0)]
    assert estimates == [0.01, pytest.approx(0.2), pytest.approx(2.0)]


def test_after_few_departures_the_retry_time_uses_the_average_stay() -> None:
    admission = AdmissionControl(100, PLENTY)
    for number in range(20):  # one at a time, four seconds each: no limit closes, so no throughput is measured
        admission.admit("m", 1, 10.0 * number).release(10.0 * number + 4)
    slots = [admission.admit("m", 1, 1000.0) for _ in range(100)]
    assert seconds(refusal(admission, 1000.0)) == pytest.approx(20 / (100 / 4))
    for slot in slots[:4]:
        slot.release(1004.0)
    assert 0.3 < seconds(refusal(admission, 1004.0)) < 3.0


def test_a_stalled_engine_makes_the_retry_time_longer() -> None:
    admission, slots = full(100)
    now = overload(admission, slots, 0.1, 101, 0.0)
    assert admission.seconds_until_next_end(now) == pytest.approx(0.1, rel=0.05)
    estimates = [seconds(refusal(admission, now + stalled)) for stalled in (0.0, 10.0, 100.0)]
    assert estimates[0] < 2.1
    assert estimates[0] * 2 < estimates[1] * 2 < estimates[2]


# Against a model that computes each sum anew


class LimiterAgainstModel(RuleBasedStateMachine):
    """Random amounts with a limit of 20 and a low watermark of 16."""

    def __init__(self) -> None:
        super().__init__()
        self.limiter = Limiter(20)
        self.held: dict[int, int] = {}
        self.closed = False
        self.now = 0.0
        self.numbers = iter(range(PLENTY))

    @rule(amount=st.integers(1, 25), seconds=st.floats(0, 5))
    def acquire(self, amount: int, seconds: float) -> None:
        self.now += seconds
        level = sum(self.held.values())
        fits = level == 0 or (level + amount <= 20 and not (self.closed and level > 16))
        wait = self.limiter.retry_seconds(amount, self.now)
        assert (wait is None) == fits
        if wait is None:
            number = next(self.numbers)
            self.held[number] = amount
            self.limiter.acquire(number, amount, self.now)
        else:
            assert 0.01 <= wait < float("inf")
            self.closed = level > 16

    @precondition(lambda self: self.held)
    @rule(data=st.data(), seconds=st.floats(0, 5))
    def release(self, data: st.DataObject, seconds: float) -> None:
        self.now += seconds
        number = data.draw(st.sampled_from(sorted(self.held)))
        del self.held[number]
        self.limiter.release(number, self.now)
        self.limiter.release(number, self.now)
        self.update_closed()

    @precondition(lambda self: self.held)
    @rule(data=st.data(), part=st.floats(0, 1))
    def resize(self, data: st.DataObject, part: float) -> None:
        number = data.draw(st.sampled_from(sorted(self.held)))
        self.held[number] = max(1, int(part * self.held[number]))
        self.limiter.resize(number, self.held[number], self.now)
        self.update_closed()

    def update_closed(self) -> None:
        self.closed = self.closed and sum(self.held.values()) > 16

    @invariant()
    def level_is_the_sum(self) -> None:
        assert self.limiter.level == sum(self.held.values())
        assert self.limiter.level <= 20 or len(self.held) == 1
        assert len(self.limiter) == len(self.held)


TestLimiterAgainstModel = LimiterAgainstModel.TestCase
TestLimiterAgainstModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
