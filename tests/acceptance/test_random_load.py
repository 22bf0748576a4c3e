"""10,000 short random requests in a tiny pool: each ends with a right status, nothing is left, and no memory grows.

Memory is the resident set of each of the three processes, looked at when nothing runs: after the first thousand
requests, which warm everything up, and after each thousand from there on.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.acceptance.conftest import Record
from tests.random_load import Outcomes, check_against_those_alone, check_that_nothing_is_left, run_errands
from tests.random_load import start_in_a_tiny_pool as start
from tests.running_quire import RunningQuire

THOUSANDS = 10
MIB = 1024**2


@pytest.fixture(scope="module")
def tiny_pool(tiny_model: Callable[[str], Path]) -> Iterator[RunningQuire]:
    one = start(tiny_model("llama"))
    yield one
    assert one.close() == 0, "a gateway with a live request would not have drained"


def test_10000_random_requests_end_with_a_right_status_nothing_is_left_and_no_memory_grows(
    tiny_pool: RunningQuire, record: Record
) -> None:
    outcomes = Outcomes()
    resident: list[dict[str, float]] = []
    for thousand in range(THOUSANDS):
        run_errands(tiny_pool, range(1000 * thousand, 1000 * (thousand + 1)), outcomes)
        check_that_nothing_is_left(tiny_pool)
        resident.append(resident_mib(tiny_pool))
        record(resident_mib=resident, codes=outcomes.by_code(), kinds=outcomes.by_kind())
    assert outcomes.faults == []


def resident_mib(quire: RunningQuire) -> dict[str, float]:
    return {name: round(psutil.Process(pid).memory_info().rss / MIB, 1) for name, pid in quire.children().items()}
