"""The limit and the delays of restarts."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.local.supervisor import FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS, Restarts

RESET = 10.0
UPTIMES = st.lists(st.sampled_from([0.0, 1.0, RESET - 0.1, RESET, 100.0]), max_size=12)


@given(most=st.integers(0, 4), uptimes=UPTIMES)
def test_consecutive_restarts_are_bounded_and_their_delays_grow(most: int, uptimes: list[float]) -> None:
    restarts = Restarts(most, RESET)
    row: list[float] = []
    for ready_seconds in uptimes:
        if ready_seconds >= RESET:
            row = []
        delay = restarts.next_delay(ready_seconds)
        assert (delay is None) == (len(row) == most)
        if delay is None:
            return
        row.append(delay)
        if len(row) == 1:
            assert delay == (0.0 if ready_seconds else FIRST_DELAY_SECONDS)
        assert all(delay == FIRST_DELAY_SECONDS for delay in row[1:2])
        assert all(second == min(2 * first, LONGEST_DELAY_SECONDS) for first, second in itertools.pairwise(row[1:]))


@pytest.mark.parametrize("reset_seconds", [0.0, RESET])
def test_a_service_that_is_never_ready_reaches_the_limit(reset_seconds: float) -> None:
    restarts = Restarts(100, reset_seconds)
    delays = [restarts.next_delay(0.0) for _ in range(101)]
    assert delays[-2:] == [LONGEST_DELAY_SECONDS, None]
