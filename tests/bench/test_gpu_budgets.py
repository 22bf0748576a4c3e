"""Budgets and deadlines of `make gpu-check`, the union of profiled activities, and the choice of tiles."""

import pytest

from bench.gpu_check.budgets import BUDGETS, SECONDS, Deadline, limit_of, working_seconds
from bench.gpu_check.profiles import Span, is_kernel, merged, occupancy

NAMES = ["ceilings", "exactness", "start", "llama", "sampler", "decode", "sweep", "prefill", "copies", "tests"]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def limits(total: float, spent: list[float]) -> list[float]:
    """The limit of each part, where the parts take these seconds, or their limits if less."""
    budgets, left, found = list(BUDGETS.values()), total, []
    for place, seconds in enumerate(spent):
        found.append(limit_of(budgets[place], budgets[place + 1 :], left))
        left -= min(seconds, found[-1])
    return found


def test_parts_run_in_this_order_and_a_run_fits_into_a_call_of_ten_minutes() -> None:
    assert list(BUDGETS) == NAMES
    assert [int(seconds) for seconds in BUDGETS.values()] == [20, 60, 75, 110, 50, 50, 65, 40, 30, 40]
    assert sum(BUDGETS.values()) == SECONDS == 540


def test_each_part_has_its_budget_though_all_run_over() -> None:
    assert limits(SECONDS, [1e9] * len(BUDGETS)) == pytest.approx(list(BUDGETS.values()))


def test_the_tests_get_what_the_parts_before_leave() -> None:
    assert limits(SECONDS, [10.0] * len(BUDGETS))[-1] == SECONDS - 90


def test_limits_shrink_with_the_time_of_a_run_and_never_exceed_it() -> None:
    shrunk = limits(54.0, [1e9] * len(BUDGETS))
    assert shrunk == pytest.approx([seconds / 10 for seconds in BUDGETS.values()])
    assert limit_of(60, [150], -5) == limit_of(60, [], -5) == 0


def test_a_part_stops_before_it_is_killed() -> None:
    assert working_seconds(120) == 115
    assert working_seconds(20) == 18


def test_a_deadline_passes_at_its_moment_and_parts_of_it_earlier() -> None:
    clock = Clock()
    deadline = Deadline(110.0, clock)
    half = deadline.part(0.5)
    clock.now = 105.0
    assert (half.passed(), deadline.passed(), deadline.left()) == (True, False, 5.0)
    clock.now = 200.0
    assert (deadline.passed(), deadline.left(), deadline.part(0.5).left()) == (True, 0.0, 0.0)


def test_the_union_of_activities_counts_time_with_several_once() -> None:
    spans = [Span(20, 30), Span(0, 4), Span(22, 25), Span(4, 6), Span(29, 40)]
    assert merged(spans) == [Span(0, 6), Span(20, 40)]
    assert merged([]) == []


def test_idle_time_is_split_into_gaps_between_kernels_and_those_of_the_host() -> None:
    use = occupancy([Span(0, 50), Span(51, 80), Span(110, 150), Span(160, 200)])
    assert (use.wall, use.busy, use.gaps) == (200, 159, 30)
    assert use.idle_share == pytest.approx(41 / 200)
    assert use.idle_share_between_steps == pytest.approx(30 / 200)


def test_a_profile_without_kernels_is_an_error_and_not_an_idle_device() -> None:
    with pytest.raises(ValueError, match="no kernel"):
        occupancy([])


def test_copies_and_marks_of_the_profiler_do_not_count_as_computation() -> None:
    names = ["_decode", "Memcpy HtoD (Pinned -> Device)", "Memset (Device)", "ProfilerStep#1", "void gemm<float>"]
    assert [name for name in names if is_kernel(name)] == ["_decode", "void gemm<float>"]
