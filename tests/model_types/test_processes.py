"""Cases run in processes of their own, which end with their time and memory."""

from tests.model_types.cases import Case
from tests.model_types.judgement import Judgement
from tests.model_types.planted import aborting, fine, hanging, hungry, leaving, raising
from tests.model_types.processes import Bounds, judged, judged_apart

CASE = Case("llama", "", {})
LONG = Bounds(seconds=120)


def test_a_judgement_comes_back() -> None:
    assert judged_apart(CASE, fine, LONG) == Judgement("equal", tokens=len("llama"))


def test_a_process_that_hangs_takes_too_long() -> None:
    assert judged_apart(CASE, hanging, Bounds(seconds=2)) == Judgement("too long", "more than 2 seconds")


def test_an_exception_is_a_crash() -> None:
    assert judged_apart(CASE, raising, LONG) == Judgement("crash", "AssertionError: blocks are held")


def test_a_process_that_ends_without_a_judgement_is_a_crash() -> None:
    assert judged_apart(CASE, aborting, LONG) == Judgement("crash", "its process ended with SIGSEGV")
    assert judged_apart(CASE, leaving, LONG) == Judgement("crash", "its process ended with exit status 3")


def test_more_memory_than_allowed_is_a_crash() -> None:
    found = judged_apart(CASE, hungry, Bounds(seconds=120, memory_mib=1024))
    assert found == Judgement("crash", "it takes more than 1024 MiB")


def test_cases_are_judged_side_by_side() -> None:
    chosen = [Case("llama", str(number), {}) for number in range(4)]
    assert {case.name for case, _ in judged(chosen, fine, LONG, jobs=2)} == {case.name for case in chosen}
