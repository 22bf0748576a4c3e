"""14,000 short random requests in a tiny pool: each ends with the expected status, and no memory grows.

Memory is the resident set of each idle process after each thousand requests. Allowed growth:

* gateway and engine: memory that the C library's allocator keeps. The number and size of Python objects stay constant.
  Measured over 19,000 requests, in MiB: the engine grows from 483.2 to 489.2 in the first eleven thousand, and stays
  between 488.7 and 489.4 then. So growth is bounded from the first thousand on, and ends in the last six: medians of
  three readings are compared, because one reading varies by 0.5.
* KV manager: the same, and its ledger of the latest 100,000 events, which is full after about seven thousand requests.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import psutil
import pytest

from tests.acceptance.conftest import Record
from tests.running_quire import RunningQuire
from tests.scrape import Scrape
from tests.services.random_load import (
    KINDS,
    Outcomes,
    check_against_those_alone,
    check_that_nothing_is_left,
    events_so_far,
    run_errands,
    start_in_a_tiny_pool,
)

THOUSANDS = 14
MIB = 1024**2
ALLOCATOR_MIB = 8
SETTLED_MIB = 1  # in three thousand requests: a leak of 350 bytes a request exceeds it
MAX_EVENTS = 100_000
EVENT_BYTES = 300  # including its list entries

Resident = dict[str, float]  # MiB by service


@pytest.fixture(scope="module")
def tiny_pool(tiny_model: Callable[[str], Path]) -> Iterator[RunningQuire]:
    one = start_in_a_tiny_pool(tiny_model("llama"))
    yield one
    assert one.close() == 0, "a gateway with a live request would not have drained"


def test_14000_random_requests_end_with_the_expected_status_and_no_memory_grows(
    tiny_pool: RunningQuire, record: Record
) -> None:
    outcomes = Outcomes()
    resident: list[Resident] = []
    events: list[int] = []
    for thousand in range(THOUSANDS):
        run_errands(tiny_pool, range(1000 * thousand, 1000 * (thousand + 1)), outcomes)
        check_that_nothing_is_left(tiny_pool)
        events.append(events_so_far(tiny_pool))
        resident.append(resident_mib(tiny_pool))
    totals, engine = tiny_pool.pool().totals, Scrape.of(tiny_pool.metrics_urls["engine"])
    growth = {name: round(resident[-1][name] - mib, 1) for name, mib in resident[0].items()}
    kept = min(events[-1], MAX_EVENTS) - min(events[0], MAX_EVENTS)
    full = next(number for number, seen in enumerate(events) if seen >= MAX_EVENTS)
    manager = [mib["kvmanager"] for mib in resident]
    record(
        ends=outcomes.by_code(),
        kinds=outcomes.by_kind(),
        preempted=dict(outcomes.preempted),
        swapped_tokens=engine.value("quire_swapped_tokens_total"),
        recomputed_tokens=engine.value("quire_recomputed_tokens_total"),
        blocks_to_host=totals.to_host_blocks,
        blocks_to_device=totals.to_device_blocks,
        audits=totals.audits,
        resident_mib=resident,
        growth_mib=growth,
        events_of_the_ledger=events,
        wrong=len(outcomes.faults),
    )
    assert outcomes.faults == []
    assert sum(outcomes.ends.values()) == 1000 * THOUSANDS
    assert totals.audits > 0
    assert outcomes.preempted.keys() == KINDS
    assert engine.value("quire_swapped_tokens_total") > 0
    for name in ("gateway", "engine"):
        assert growth[name] < ALLOCATOR_MIB
        before, after = (median(one[name] for one in part) for part in (resident[-6:-3], resident[-3:]))
        assert after - before < SETTLED_MIB, name
    assert growth["kvmanager"] < ALLOCATOR_MIB + kept * EVENT_BYTES / MIB
    assert full < THOUSANDS - 2
    assert manager[-1] - manager[full] < ALLOCATOR_MIB / 2
    check_against_those_alone(tiny_pool, outcomes)


def resident_mib(quire: RunningQuire) -> Resident:
    return {name: round(psutil.Process(pid).memory_info().rss / MIB, 1) for name, pid in quire.children().items()}
