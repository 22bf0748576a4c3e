"""No number of a request hurts another: each case ends in an answer, or in a refusal that names a field."""

from tests.extremes import Outcomes, run_cases
from tests.running_quire import RunningQuire

CASES = 400  # 20,000 in tests/acceptance


def test_numbers_at_their_extremes_in_pairs_end_well_or_are_refused_by_name(tiny_quire: RunningQuire) -> None:
    outcomes = Outcomes()
    run_cases(tiny_quire, range(CASES), outcomes)
    assert outcomes.faults == []
    assert sum(outcomes.ends.values()) == CASES
    assert min(outcomes.ends["engine: OK"], outcomes.ends["gateway: OK"]) > CASES / 5, "most of them are computed with"
