"""Arrivals, bounds and shares of a load."""

import math
from itertools import islice

import numpy as np
import pytest

from services.loadgen.workload.arrivals import Arrivals, ClosedLoop, Random, TraceTimes
from services.loadgen.workload.lengths import Fixed
from services.loadgen.workload.load import Bounds, Load
from services.loadgen.workload.workloads import RandomLengths
from tests.services.loadgen.sessions import Sessions, session

ENDLESS = RandomLengths(Fixed(8), Fixed(4))


def starts(arrivals: Arrivals, count: int) -> np.ndarray:
    return np.array([timed.start for timed in islice(arrivals.timed(ENDLESS.sessions()), count)])


def test_poisson_arrivals_follow_their_seed_and_have_their_rate_and_spread() -> None:
    gaps = np.diff(starts(Random(rate=4.0, seed=1), 20_001))
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.05)
    assert np.array_equal(starts(Random(4.0, seed=1), 50), starts(Random(4.0, seed=1), 50))
    assert not np.array_equal(starts(Random(4.0, seed=1), 50), starts(Random(4.0, seed=2), 50))


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_burstiness_changes_the_variance_of_arrivals_and_not_their_rate(burstiness: float) -> None:
    gaps = np.diff(starts(Random(4.0, burstiness), 40_001))
    assert gaps.mean() == pytest.approx(0.25, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_an_infinite_rate_starts_all_at_once() -> None:
    assert set(starts(Random(math.inf), 10)) == {0.0}


def test_a_trace_starts_at_its_times_divided_by_the_speedup() -> None:
    timed = list(TraceTimes(speedup=4.0).timed([session(1, 8.0), session(1, 2.0)]))
    assert [one.start for one in timed] == [0.5, 2.0]


def test_a_bound_of_requests_counts_calls_and_cuts_the_last_session() -> None:
    load = Load(Sessions(session(3), session(3), session(3)), ClosedLoop(2), Bounds(requests=3, warmup=2))
    planned = list(load.planned())
    assert [(one.number, one.first_call, len(one.session.calls)) for one in planned] == [(0, 0, 3), (1, 3, 2)]
    assert load.request_count() == 5


def test_a_bound_of_seconds_ends_the_starts_of_sessions() -> None:
    load = Load(ENDLESS, Random(10.0, seed=3), Bounds(seconds=20.0, warmup=10.0))
    planned = list(load.planned())
    assert planned[-1].start < 30.0
    assert len(planned) == pytest.approx(300, rel=0.15)
    assert load.request_count() is None


@pytest.mark.parametrize("arrivals", [ClosedLoop(7), Random(5.0, seed=2)])
def test_the_shares_of_several_processes_are_the_whole_load(arrivals: Arrivals) -> None:
    load = Load(ENDLESS, arrivals, Bounds(requests=50))
    shares = [list(load.share(number, 3)) for number in range(3)]
    assert sorted((one for share in shares for one in share), key=lambda one: one.number) == list(load.planned())
    limits = [load.share_of_concurrency(number, 3) for number in range(3)]
    assert limits == ([3, 2, 2] if arrivals.concurrency else [None] * 3)
