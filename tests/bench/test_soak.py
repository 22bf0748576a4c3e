"""Slopes of a soak."""

import random
from dataclasses import replace

import pytest

from bench.report.targets import targets
from bench.soak.growth import growths_of, largest
from bench.soak.samples import ProcessSample
from bench.soak.slopes import slopes_of, theil_sen, worst

RUN_SECONDS = 600.0
MIB = 1 << 20


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


def rests(per_request: float, *, noise: float = 0.2, count: int = 12, requests: int = 800) -> list[ProcessSample]:
    """Samples at rest of a process that grows by some bytes with each request, and by noise in MiB to both sides."""
    draw = random.Random(4)
    grown = [70 + at * requests * per_request / MIB + draw.uniform(-noise, noise) for at in range(count)]
    return [
        ProcessSample("gateway-a", 1, 60.0 * at, True, 90.0, mib, 9, 9, 99, requests=at * requests)
        for at, mib in enumerate(grown)
    ]


@pytest.mark.parametrize(
    ("per_request", "verdict"), [(0, ": flat: "), (100, ": flat: "), (700, ": grows by "), (256, ": undecided: ")]
)
def test_growth_is_judged_by_request_with_its_confidence(per_request: float, verdict: str) -> None:
    (growth,) = growths_of(rests(per_request), 720.0)
    assert growth.low < growth.bytes_per_request < growth.high
    assert growth.bytes_per_request == pytest.approx(per_request, abs=60)
    assert verdict in growth.words(256)


def test_a_rest_before_memory_was_returned_moves_the_growth_little() -> None:
    one_high = [replace(one, anonymous_mib=one.anonymous_mib + 4 * (at == 6)) for at, one in enumerate(rests(0))]
    (growth,) = growths_of(one_high, 720.0)
    assert ": flat: " in growth.words(256)


def test_few_requests_leave_growth_undecided() -> None:
    (growth,) = growths_of(rests(0, requests=20), 720.0)
    assert ": undecided: " in growth.words(256)


def test_a_process_with_few_rests_after_its_warm_up_is_not_judged() -> None:
    assert growths_of(rests(5000, count=6), 360.0) == []
    assert largest([], "gateway") is None


def test_the_worst_process_of_a_service_counts() -> None:
    found = growths_of(rests(10), 720.0) + [one._replace(process="gateway-b") for one in growths_of(rests(900), 720.0)]
    assert largest(found, "gateway") == pytest.approx(900, abs=120)


def test_growth_rises_in_the_warm_up_are_left_out() -> None:
    warm_up = [replace(one, anonymous_mib=20.0 * at) for at, one in enumerate(rests(0)[:2])]
    (growth,) = growths_of([*warm_up, *rests(0)[3:]], 720.0)
    assert growth.high < 256
