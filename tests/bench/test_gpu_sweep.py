"""The sweep of tile shapes, and the counts of the test suite, of `make gpu-check`."""

import ast
from itertools import count

import pytest

pytest.importorskip("triton")

from bench.gpu_check.budgets import Deadline
from bench.gpu_check.parts import sweep
from bench.gpu_check.parts.tests import counted
from bench.gpu_check.tile_trials import Split, Swap
from engine.triton_kernels.tuning import (
    MIN_CHUNK,
    PROGRAMS_PER_PROCESSOR,
    SMALL_TILES,
    SWAP_PROGRAMS,
    TILES,
    WAVES,
    Tiles,
    Tiling,
)

SLOW, FAST, BROKEN = Split(1, 1, 1), Split(2, 1, 1), Split(3, 1, 1)
SECONDS = {SLOW: 4.0, FAST: 2.0}


def test_candidates_that_fail_are_left_out_and_the_fastest_wins() -> None:
    found = sweep.tried([SLOW, BROKEN, FAST, SLOW], SECONDS.__getitem__, Deadline(1.0, lambda: 0.0))
    assert [trial.candidate for trial in found] == [SLOW, FAST]
    assert (sweep.best_of(found), sweep.gain_of(found)) == (FAST, 2.0)


def test_a_failure_of_the_committed_candidate_is_a_failure_of_the_sweep() -> None:
    with pytest.raises(KeyError):
        sweep.tried([BROKEN, FAST], SECONDS.__getitem__, Deadline(1.0, lambda: 0.0))


def test_a_sweep_ends_at_its_deadline_after_the_committed_candidate_at_least() -> None:
    ticks = count()
    assert len(sweep.tried([SLOW, FAST], SECONDS.__getitem__, Deadline(0.0, lambda: float(next(ticks))))) == 1


def test_the_printed_table_is_the_source_of_the_tunings() -> None:
    split, swap = Split(PROGRAMS_PER_PROCESSOR, WAVES, MIN_CHUNK), Swap(SWAP_PROGRAMS)
    for name, tables in (("TILES", TILES), ("SMALL_TILES", SMALL_TILES)):
        names = {"Tiling": Tiling, "Tiles": Tiles}
        exec(compile(ast.parse(sweep.printed(tables, split, swap, name)), "printed", "exec"), names)
        assert names[name] == tables
        assert (names["MIN_CHUNK"], names["SWAP_PROGRAMS"]) == (MIN_CHUNK, SWAP_PROGRAMS)


def test_tests_are_counted_from_their_dots_if_pytest_was_ended() -> None:
    assert counted("..F.\n===\n3 passed, 1 failed in 2 s\n") == {"passed": 3, "failed": 1}
    assert counted("...F..   [ 10%]\n....") == {"passed": 9, "failed": 1}
