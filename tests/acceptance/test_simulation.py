"""The simulator finds each fault that the product once had, planted again, within five minutes."""

from pathlib import Path

import pytest

from tests.acceptance.conftest import Record
from tests.simulation.planted_faults import PLANTED, copied_tree, found

SECONDS = 300.0


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copied_tree(tmp_path_factory.mktemp("planted") / "tree")


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_within_five_minutes(name: str, tree: Path, record: Record) -> None:
    violation = found(PLANTED[name], tree, SECONDS)
    assert violation is not None
    assert "violates" in violation.violation
    record(seconds=round(violation.seconds), violation=violation.violation)
