"""Slopes of a soak."""

import pytest

from bench.report.targets import targets
from bench.soak.samples import ProcessSample
from bench.soak.slopes import slopes_of, theil_sen, worst

RUN_SECONDS = 600.0


def sample(
    seconds: float, mib: float, *, process: str = "gateway-a", descriptors: int = 20, rest: bool = False
) -> ProcessSample:
    return ProcessSample(process, 1, seconds, rest, 2 * mib, mib, descriptors, 9, 100)


def test_outliers_do_not_move_the_slope() -> None:
    values = [3.0 * minute for minute in range(20)]
    values[4], values[11] = 900.0, -500.0
    assert theil_sen(range(20), values) == pytest.approx(3.0)


@pytest.mark.parametrize("times", [[], [1.0], [2.0, 2.0]])
def test_one_time_has_no_slope(times: list[float]) -> None:
    assert theil_sen(times, [1.0] * len(times)) is None


def test_a_leak_is_a_slope_although_the_warm_up_rose_and_the_load_swings() -> None:
    warm_up = [sample(second, second) for second in range(0, 120, 10)]
    leak = [sample(second, 200 + 2 * second / 60 + second % 30) for second in range(120, 600, 10)]
    (slopes,) = slopes_of(warm_up + leak, RUN_SECONDS)
    assert slopes.judged
    assert slopes.per_minute["anonymous_mib"] == pytest.approx(2.0, abs=0.1)


def test_file_descriptors_are_compared_at_rest() -> None:
    load = [sample(second, 50, descriptors=20 + second) for second in range(0, 600, 10)]
    rests = [sample(second + 5, 50, descriptors=20, rest=True) for second in range(0, 600, 50)]
    (slopes,) = slopes_of(load + rests, RUN_SECONDS)
    assert slopes.per_minute["file_descriptors"] == 0.0


def test_a_process_that_was_killed_early_is_not_judged_and_the_steepest_other_counts() -> None:
    killed = [sample(second, 9 * second, process="engine-b") for second in range(0, 200, 10)]
    one = [sample(second, second / 60, process="engine-a") for second in range(0, 600, 10)]
    other = [sample(second, -second / 60, process="engine-c") for second in range(0, 600, 10)]
    slopes = slopes_of([*killed, *one, *other], RUN_SECONDS)
    assert [slope.judged for slope in slopes] == [True, False, True]
    assert worst(slopes, "engine", "anonymous_mib") == pytest.approx(1.0)
    assert worst(slopes, "gateway", "anonymous_mib") is None


def test_each_target_names_a_slope_that_is_measured() -> None:
    (slopes,) = slopes_of([sample(second, 50) for second in range(0, 600, 10)], RUN_SECONDS)
    metrics = {name.partition("_")[2].removesuffix("_slope") for name in targets()["soak"] if name.endswith("_slope")}
    assert metrics <= slopes.per_minute.keys()
