"""20,000 requests with extreme numbers, two at a time, do not affect a concurrent stream."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.acceptance.conftest import Record
from tests.running_quire import start_quire
from tests.services.extremes import Outcomes, run_cases

CASES = 20_000
PIECE = 1000


def test_20_000_cases_finish_or_are_refused_naming_the_field(
    tiny_model: Callable[[str], Path], record: Record, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes = Outcomes()
    quire = start_quire("--model", str(tiny_model("llama")), "--device-blocks", "256", "--max-sequences", "64")
    try:
        for done in range(0, CASES, PIECE):
            run_cases(quire, range(done, done + PIECE), outcomes)
            with capsys.disabled():
                sys.stdout.write(f"\n{done + PIECE} of {CASES} cases, {len(outcomes.faults)} faults")
                sys.stdout.flush()
    finally:
        record(ends=dict(outcomes.ends), faults=len(outcomes.faults))
        status = quire.close()
    assert outcomes.faults == []
    assert sum(outcomes.ends.values()) == CASES
    assert status == 0
