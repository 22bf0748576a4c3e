"""Concurrent random requests in a tiny pool: each ends with the expected status, and none holds blocks afterwards."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.running_quire import RunningQuire
from tests.services.random_load import (
    Outcomes,
    check_against_those_alone,
    check_that_nothing_is_left,
    run_errands,
    start_in_a_tiny_pool,
)

ERRANDS = 200


@pytest.fixture(scope="module")
def tiny_pool(tiny_model: Callable[[str], Path]) -> Iterator[RunningQuire]:
    one = start_in_a_tiny_pool(tiny_model("llama"))
    yield one
    one.close()


def test_200_random_requests_end_with_the_expected_status_and_hold_no_blocks(tiny_pool: RunningQuire) -> None:
    outcomes = Outcomes()
    run_errands(tiny_pool, range(ERRANDS), outcomes)
    assert outcomes.faults == []
    assert sum(outcomes.ends.values()) == ERRANDS
    assert outcomes.preempted.total() > 0, "no sequence was preempted"
    check_that_nothing_is_left(tiny_pool)
    check_against_those_alone(tiny_pool, outcomes)
