"""Bounds, places and forecasts, with times made up."""

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


# Bounds


def test_requests_are_let_in_up_to_the_limit_and_again_from_the_lower_mark_on() -> None:
    admission = AdmissionControl(10, PLENTY)
    places = [admission.admit("m", 1, 0.0) for _ in range(10)]
    assert "10 sequences are in flight, the limit is 10" in str(refusal(admission, 1.0))
    places.pop().release(2.0)
    refusal(admission, 2.0)
    places.pop().release(3.0)
    assert admission.requests == 8
    for _ in range(2):
        admission.admit("m", 1, 3.0)
    refusal(admission, 3.0)


def test_a_request_counts_once_for_each_of_its_sequences() -> None:
    admission = AdmissionControl(10, PLENTY)
    place = admission.admit("m", 1, 0.0, Sequences(8, "sampling.sample_count"))
    with pytest.raises(Overloaded, match=r"8 sequences are in flight, the limit is 10, and beam_search.width is 3"):
        admission.admit("m", 1, 0.0, Sequences(3, "beam_search.width"))
    place.release(1.0)
    assert admission.requests == 0
    admission.admit("m", 1, 1.0, Sequences(11, "beam_search.width"))  # alone


def test_a_bound_that_nobody_ran_into_has_no_lower_mark() -> None:
    admission = AdmissionControl(10, PLENTY)
    places = [admission.admit("m", 1, 0.0) for _ in range(10)]
    places.pop().release(1.0)
    admission.admit("m", 1, 1.0)


def test_requests_of_all_models_are_bounded_together_and_tokens_of_each_for_itself() -> None:
    admission = AdmissionControl(3, 100)
    admission.admit("a", 100, 0.0)
    assert "100 tokens are queued, the limit is 100" in str(refusal(admission, 0.0, 1, "a"))
    admission.admit("b", 100, 0.0)
    admission.admit("c", 100, 0.0)
    assert "3 sequences are in flight" in str(refusal(admission, 0.0, 1, "d"))
    assert [admission.queued_tokens(model) for model in "abcd"] == [100, 100, 100, 0]


def test_tokens_wait_until_the_request_is_begun_and_its_place_is_taken_until_it_ends() -> None:
    admission = AdmissionControl(2, 100)
    place = admission.admit("m", 90, 0.0)
    refusal(admission, 0.0, 20)
    place.on_started(1.0)
    assert (admission.queued_tokens("m"), admission.requests, place.queued) == (0, 1, False)
    admission.admit("m", 100, 1.0)
    refusal(admission, 1.0, 1)
    place.release(2.0)
    place.release(2.0)
    assert (admission.queued_tokens("m"), admission.requests) == (100, 1)


def test_what_a_request_weighs_is_corrected_once_it_is_known() -> None:
    admission = AdmissionControl(10, 100)
    place = admission.admit("m", 90, 0.0)
    refusal(admission, 0.0, 20)
    place.set_tokens(30, 0.1)
    admission.admit("m", 20, 0.1)
    place.release(0.2)
    place.set_tokens(50, 0.3)
    assert admission.queued_tokens("m") == 20


def test_a_request_larger_than_the_bound_is_let_in_where_nothing_else_waits() -> None:
    admission = AdmissionControl(10, 100)
    small = admission.admit("m", 1, 0.0)
    refusal(admission, 0.0, 500)
    small.on_started(1.0)
    large = admission.admit("m", 500, 1.0)
    refusal(admission, 1.0)
    large.on_started(2.0)
    admission.admit("m", 100, 2.0)


def test_a_large_request_that_is_refused_keeps_no_small_one_out() -> None:
    admission = AdmissionControl(10, 100)
    admission.admit("m", 50, 0.0)
    refusal(admission, 0.0, 60)
    admission.admit("m", 10, 0.0)


# Forecasts


def full(limit: int) -> tuple[AdmissionControl, list[AdmissionSlot]]:
    admission = AdmissionControl(limit, PLENTY)
    return admission, [admission.admit("m", 1, 0.0) for _ in range(limit)]


def overload(
    admission: AdmissionControl, places: list[AdmissionSlot], seconds_each: float, departures: int, now: float
) -> float:
    """Let the oldest leave one after the other while more come than may; return the time then."""
    for _ in range(departures):
        with suppress(Overloaded):
            while True:
                places.append(admission.admit("m", 1, now))
        now += seconds_each
        places.pop(0).release(now)
    return now


@pytest.mark.parametrize("rate", [0.5, 40.0])
def test_the_forecast_is_the_way_to_the_lower_mark_at_the_measured_throughput(rate: float) -> None:
    admission, places = full(100)
    now = overload(admission, places, 1 / rate, 100, 0.0)
    while admission.requests > 81:
        assert seconds(refusal(admission, now)) == pytest.approx((admission.requests - 80) / rate, rel=0.02)
        now = overload(admission, places, 1 / rate, 1, now)


def test_the_forecast_of_tokens_counts_tokens() -> None:
    admission = AdmissionControl(PLENTY, 1000)
    places = [admission.admit("m", 100, 0.0) for _ in range(10)]
    now = 0.0
    for _ in range(15):  # 100 tokens every 2 seconds
        refusal(admission, now, 1)
        for _ in range(2):
            now += 2.0
            places.pop(0).on_started(now)
        places += [admission.admit("m", 100, now) for _ in range(2)]
    assert seconds(refusal(admission, now, 1)) == pytest.approx(200 / 50, rel=0.02)
    assert seconds(refusal(admission, now, 700)) == pytest.approx(700 / 50, rel=0.02)


def test_time_in_which_nobody_is_refused_does_not_count() -> None:
    admission, places = full(100)
    now = overload(admission, places, 0.1, 100, 0.0)
    for place in places:
        place.release(now)
    for _ in range(50):  # an hour with a request a minute
        now += 60
        admission.admit("m", 1, now).release(now + 1)
    places = [admission.admit("m", 1, now) for _ in range(100)]
    assert 1.0 < seconds(refusal(admission, now)) <= 20 * 0.1


def test_before_anything_has_left_the_forecast_grows_with_the_time_that_passed() -> None:
    admission, _ = full(100)
    forecasts = [seconds(refusal(admission, now)) for now in (0.0, 1.0, 10.0)]
    assert forecasts == [0.01, pytest.approx(0.2), pytest.approx(2.0)]


def test_after_few_departures_the_forecast_goes_by_how_long_requests_stay() -> None:
    admission = AdmissionControl(100, PLENTY)
    for number in range(20):  # one at a time, four seconds each: no throughput can be told from that
        admission.admit("m", 1, 10.0 * number).release(10.0 * number + 4)
    places = [admission.admit("m", 1, 1000.0) for _ in range(100)]
    assert seconds(refusal(admission, 1000.0)) == pytest.approx(20 / (100 / 4))
    for place in places[:4]:
        place.release(1004.0)
    assert 0.3 < seconds(refusal(admission, 1004.0)) < 3.0


def test_an_engine_that_stands_still_makes_the_forecast_longer() -> None:
    admission, places = full(100)
    now = overload(admission, places, 0.1, 101, 0.0)
    forecasts = [seconds(refusal(admission, now + stood)) for stood in (0.0, 10.0, 100.0)]
    assert forecasts[0] < 2.1
    assert forecasts[0] * 2 < forecasts[1] * 2 < forecasts[2]


def test_when_the_next_request_ends_is_foreseen_too() -> None:
    admission, places = full(100)
    now = overload(admission, places, 0.1, 101, 0.0)
    assert admission.seconds_until_next_end(now) == pytest.approx(0.1, rel=0.05)


# A twin that adds everything up anew


class BoundBesideItsTwin(RuleBasedStateMachine):
    """Random amounts of a bound of 20, whose lower mark is 16."""

    def __init__(self) -> None:
        super().__init__()
        self.bound = Limiter(20)
        self.inside: dict[int, int] = {}
        self.closed = False
        self.now = 0.0
        self.numbers = iter(range(PLENTY))

    @rule(amount=st.integers(1, 25), seconds=st.floats(0, 5))
    def come(self, amount: int, seconds: float) -> None:
        self.now += seconds
        level = sum(self.inside.values())
        fits = level == 0 or (level + amount <= 20 and not (self.closed and level > 16))
        wait = self.bound.retry_seconds(amount, self.now)
        assert (wait is None) == fits
        if wait is None:
            number = next(self.numbers)
            self.inside[number] = amount
            self.bound.acquire(number, amount, self.now)
        else:
            assert 0.01 <= wait < float("inf")
            self.closed = level > 16

    @precondition(lambda self: self.inside)
    @rule(data=st.data(), seconds=st.floats(0, 5))
    def leave(self, data: st.DataObject, seconds: float) -> None:
        self.now += seconds
        number = data.draw(st.sampled_from(sorted(self.inside)))
        del self.inside[number]
        self.bound.release(number, self.now)
        self.bound.release(number, self.now)
        self.note_level()

    @precondition(lambda self: self.inside)
    @rule(data=st.data(), part=st.floats(0, 1))
    def correct(self, data: st.DataObject, part: float) -> None:
        number = data.draw(st.sampled_from(sorted(self.inside)))
        self.inside[number] = max(1, int(part * self.inside[number]))
        self.bound.resize(number, self.inside[number], self.now)
        self.note_level()

    def note_level(self) -> None:
        self.closed = self.closed and sum(self.inside.values()) > 16

    @invariant()
    def level_is_the_sum(self) -> None:
        assert self.bound.level == sum(self.inside.values())
        assert self.bound.level <= 20 or len(self.inside) == 1
        assert len(self.bound) == len(self.inside)


TestBoundBesideItsTwin = BoundBesideItsTwin.TestCase
TestBoundBesideItsTwin.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
