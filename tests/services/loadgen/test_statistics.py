"""Figures of records, compared with numpy's and with figures computed by hand."""

from array import array
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.loadgen.records import COMPLETED, Record, Usage
from services.loadgen.statistics import Objectives, counted, gaps_of, in_flight, spread, summarize, tokens_over_time
from services.loadgen.workload.load import Bounds

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=200)


def record(
    number: int = 0,
    sent: float = 0.0,
    tokens: Sequence[tuple[float, int]] = (),
    ended: float | None = None,
    *,
    requested: int | None = None,
    status: str = COMPLETED,
    retry_after: float | None = None,
    usage: Usage | None = None,
) -> Record:
    """Build the record of a request of 10 prompt tokens; `tokens` are times and counts."""
    made = Record(number, number, 10, requested or sum(count for _, count in tokens), sent, sent)
    made.times = array("d", [time for time, _ in tokens])
    made.counts = array("l", [count for _, count in tokens])
    made.ended = ended if ended is not None else tokens[-1][0]
    made.status, made.retry_after, made.usage = status, retry_after, usage or Usage()
    return made


@given(VALUES)
def test_percentiles_equal_numpys(values: list[float]) -> None:
    made = spread(values)
    assert made is not None
    assert made.count == len(values)
    assert [made.p50, made.p90, made.p95, made.p99] == list(np.percentile(values, (50, 90, 95, 99)))
    assert made.max == max(values)
    assert made.mean == pytest.approx(np.mean(values))
    assert spread([]) is None


@given(st.lists(st.tuples(st.floats(0.001, 10), st.integers(1, 5)), min_size=1, max_size=50))
def test_the_gaps_of_a_request_are_one_fewer_than_its_tokens_and_sum_to_its_time(
    steps: list[tuple[float, int]],
) -> None:
    moments = np.cumsum([gap for gap, _ in steps])
    one = record(tokens=list(zip(moments.tolist(), (count for _, count in steps), strict=True)))
    gaps = gaps_of(one)
    assert len(gaps) == one.output_tokens - 1
    assert gaps.sum() == pytest.approx(moments[-1] - moments[0])


def test_tokens_of_one_message_share_the_time_since_the_last() -> None:
    one = record(tokens=[(1.0, 2), (1.6, 3), (1.7, 1)])
    assert gaps_of(one) == pytest.approx([0.0, 0.2, 0.2, 0.2, 0.1])
    assert len(gaps_of(record(ended=1.0))) == 0


def test_figures_of_a_small_run_equal_those_computed_by_hand() -> None:
    """Two answers and a refusal in the four seconds from 1 to 5."""
    records = [
        record(0, 1.0, [(1.5, 1), (2.0, 1), (3.0, 2)], usage=Usage(12, 4, 4, 1, 7, 0, 0.25)),
        record(1, 2.0, [(4.0, 1), (5.0, 1)], requested=3, usage=Usage(8, 0, 2, 0, 0, 0, 0.75)),
        record(2, 2.5, ended=2.53, status="RESOURCE_EXHAUSTED", retry_after=3.0),
    ]
    made = summarize(records, Bounds(), Objectives(ttft=1.0, e2e=10.0))
    assert (made.seconds, made.requests, made.completed) == (4.0, 3, 2)
    assert made.failures == {"RESOURCE_EXHAUSTED": 1}
    assert (made.input_tokens, made.output_tokens) == (20, 6)
    assert (made.requests_per_second, made.output_tokens_per_second) == (0.5, 1.5)
    assert (made.cached_tokens, made.prefix_hit_rate) == (4, 0.2)
    assert (made.preemptions, made.recomputed_tokens, made.failovers) == (1, 7, 0)
    assert made.peak_output_tokens_per_second == 2  # in the second after 3
    assert made.most_in_flight == 3
    assert made.other_lengths == 1
    latencies = made.latencies
    assert latencies.ttft
    assert latencies.normalized
    assert latencies.itl
    assert latencies.tpot
    assert latencies.queued
    assert (latencies.ttft.mean, latencies.ttft.max) == (1.25, 2.0)
    # The paper's: end-to-end latency over output length, mean of requests: (2 s / 4 + 3 s / 2) / 2.
    assert latencies.normalized.mean == 1.0
    assert (latencies.itl.count, latencies.itl.max) == (4, 1.0)
    assert latencies.tpot.mean == pytest.approx((1.5 / 3 + 1.0) / 2)
    assert latencies.queued.mean == 0.5
    assert made.goodput is not None
    assert (made.goodput.requests, made.goodput.share, made.goodput.requests_per_second) == (1, 1 / 3, 0.25)
    assert made.refusals.count == made.refusals.with_retry_after == 1
    assert made.refusals.retry_after_seconds is not None
    assert made.refusals.retry_after_seconds.max == 3.0
    assert made.refusals.seconds_to_answer is not None
    assert made.refusals.seconds_to_answer.max == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("objectives", "good"),
    [
        (Objectives(ttft=0.5), 1),
        (Objectives(ttft=0.49), 0),
        (Objectives(itl=0.5), 1),
        (Objectives(itl=0.49), 0),
        (Objectives(tpot=0.31), 1),
        (Objectives(tpot=0.29), 0),
        (Objectives(e2e=1.1), 1),
        (Objectives(ttft=0.5, e2e=1.0), 0),
    ],
)
def test_a_good_request_meets_all_objectives(objectives: Objectives, good: int) -> None:
    made = summarize([record(0, 0.0, [(0.5, 1), (1.0, 1), (1.1, 1)])], Bounds(), objectives)
    assert made.goodput is not None
    assert made.goodput.requests == good


def test_figures_missing_for_a_request_are_not_reported() -> None:
    made = summarize([record(0, 0.0, [(1.0, 1)], usage=Usage(10, 4)), record(1, 0.0, [(1.0, 1)])], Bounds())
    assert made.prefix_hit_rate is None
    assert made.input_tokens == 20
    assert made.preemptions is None


def test_an_empty_run_has_figures() -> None:
    made = summarize([], Bounds(), Objectives(ttft=1.0))
    assert (made.seconds, made.requests_per_second, made.latencies.e2e) == (0.0, 0.0, None)
    failed = summarize([record(0, 1.0, ended=1.0, status="UNAVAILABLE")], Bounds())
    assert (failed.completed, failed.failures, failed.refusals.count) == (0, {"UNAVAILABLE": 1}, 0)


def test_the_warm_up_is_not_counted() -> None:
    records = [record(number, float(number), [(number + 1.0, 1)]) for number in (3, 0, 2, 1)]
    assert [one.number for one in counted(records, Bounds(requests=3, warmup=1))] == [1, 2, 3]
    assert [one.number for one in counted(records, Bounds(seconds=10.0, warmup=1.5))] == [2, 3]
    assert summarize(records, Bounds(requests=3, warmup=1)).warmup_requests == 1


def test_intervals_that_touch_do_not_overlap() -> None:
    moments, open_then = in_flight(np.array([0.0, 1.0]), np.array([1.0, 3.0]))
    assert (moments.tolist(), open_then.tolist()) == ([0.0, 1.0, 1.0, 3.0], [1, 0, 1, 0])


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 9)), max_size=60), st.floats(0.1, 3))
def test_tokens_over_time_sum_to_all_tokens(tokens: list[tuple[float, int]], width: float) -> None:
    made = record(tokens=sorted(tokens), ended=30.0)
    _, rates = tokens_over_time([made], width)
    assert rates.sum() * width == pytest.approx(made.output_tokens)
