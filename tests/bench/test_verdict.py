"""Verdicts: what meets a target, and what voids it."""

import pytest

from bench.report.verdict import Run, goal, null_interval, verdict

SOUND = Run(commit="0123abc")
LEAST_1_2 = {"target": 1.2, "better": "more"}
LEAST_0_98 = {"target": 0.98, "better": "more"}


def test_a_value_meets_its_target_on_the_right_side_only() -> None:
    less, more = {"target": 15.0, "better": "less"}, {"target": 15.0, "better": "more"}
    at_most = {"target": 15.0, "better": "at most"}
    wanted = [(15.0, at_most, True), (15.1, at_most, False), (14.9, less, True), (15.0, less, False)]
    wanted += [(15.0, more, True), (14.9, more, False)]
    assert [verdict(value, target, SOUND).met for value, target, _ in wanted] == [met for *_, met in wanted]


def test_an_unmeasured_target_is_not_met_and_a_row_without_target_is_neither() -> None:
    assert verdict(None, LEAST_1_2, SOUND) == (False, None)
    assert verdict(3.0, None, SOUND) == (None, None)


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (Run(None), "void: its commit is not known"),
        (Run("0123abc-dirty"), "void: files differed from the commit"),
        (Run("0123abc", 4), "void: only 4 of the 5 repetitions it needs"),
        (Run("0123abc", foreign_cores=0.06), "void: other processes took 0.06 of a core"),
        (Run("0123abc", other_cpu=True), "void: another CPU than the newest results of its class"),
        (Run("0123abc", behind=None), "stale: its commit is not in the repository"),
        (Run("0123abc", behind=1), "stale: 1 commit behind"),
        (Run("0123abc", behind=12), "stale: 12 commits behind"),
    ],
)
def test_a_run_voids_a_value_that_would_meet_its_target_and_changes_nothing_about_a_miss(run: Run, reason: str) -> None:
    assert verdict(1.5, LEAST_1_2, run) == (False, reason)
    assert verdict(1.1, LEAST_1_2, run) == (False, reason if reason.startswith("stale") else None)


def test_a_share_of_a_physical_limit_above_one_is_void_even_without_a_target() -> None:
    assert verdict(1.01, {"target": 0.6, "better": "more"}, SOUND, limit=True) == (
        False,
        "void: above a physical limit",
    )
    assert verdict(1.36, None, SOUND, limit=True) == (None, "void: above a physical limit")
    assert verdict(0.99, {"target": 0.6, "better": "more"}, SOUND, limit=True).met is True


def test_a_target_that_asks_less_than_twice_the_null_interval_is_undecided() -> None:
    assert verdict(1.079, LEAST_0_98, SOUND, null=(0.93, 1.08)) == (
        False,
        "undecided: equal programs differ by 0.93 to 1.08",
    )
    assert verdict(0.99, LEAST_0_98, SOUND, null=(0.996, 1.004)).met is True
    assert verdict(1.3, LEAST_1_2, SOUND, null=(0.97, 1.04)).met is True
    assert verdict(1.3, LEAST_1_2, SOUND, null=(0.95, 1.06)).met is False


def test_a_target_of_equality_asks_what_the_value_shows() -> None:
    equality = {"target": 1.0, "better": "more"}
    assert verdict(1.3, equality, SOUND, null=(0.95, 1.05)).met is True
    assert verdict(1.05, equality, SOUND, null=(0.95, 1.05)).met is False


def test_a_value_that_repeats_exactly_needs_one_run_on_any_machine() -> None:
    run = Run("0123abc", 1, foreign_cores=1.5, other_cpu=True)
    assert verdict(1.5, LEAST_1_2, run, exact=True).met is True
    assert verdict(1.5, LEAST_1_2, Run("0123abc", behind=3), exact=True).met is False


def test_a_goal_says_both_of_its_parts_and_which_one_reached_more() -> None:
    value, by = goal(1.5, 0.68)
    assert value == 1.25
    assert by == "1.5 of the peer, wanted 1.2; 0.68 of the ceiling, wanted 0.85: through the peer"
    value, by = goal(1.0, 0.935)
    assert (value, by and by.rpartition(" ")[2]) == (1.1, "ceiling")
    assert goal(None, 0.9) == (None, None)


def test_nothing_is_reached_through_a_ceiling_that_was_exceeded() -> None:
    value, by = goal(0.6, 1.36)
    assert (value, by and by.rpartition(" ")[2]) == (0.5, "peer")


def test_the_null_interval_is_the_range_of_five_ratios_and_less_than_that_of_nine() -> None:
    first, again = [1.0, 1.1, 0.9, 1.0, 1.2], [1.0] * 5
    assert null_interval(first, again) == (0.9, 1.2)
    nine = [0.5, 0.9, 0.95, 0.98, 1.0, 1.02, 1.05, 1.1, 3.0]
    assert null_interval(nine, [1.0] * 9) == (0.9, 1.1)
