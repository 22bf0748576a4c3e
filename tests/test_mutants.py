"""The faults of tests/mutants, and the tests that it selects for them."""

import json
from pathlib import Path

import coverage

from tests.mutants.faults import faults_of
from tests.mutants.selection import TestMap

SOURCE = '''"""A module."""
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ast

LIMIT: int = 4


def grant(blocks: list[int], count: int = 1) -> int:
    """Take blocks."""
    if not blocks or count > LIMIT:
        raise ValueError(f"ü {count + 1}")
    blocks.remove(3)
    total = len(blocks) - count
    return total
'''


def test_each_fault_changes_one_place_of_the_code() -> None:
    faults = {(fault.line, fault.kind, fault.replacement) for fault in faults_of(SOURCE)}
    assert faults == {
        (7, "constant", "5"),
        (10, "constant", "2"),
        (12, "condition negated", "(not (not blocks or count > LIMIT))"),
        (12, "and, or", "(not blocks and count > LIMIT)"),
        (12, "comparison", "(count >= LIMIT)"),
        (13, "raise removed", "pass"),
        (14, "statement removed", "pass"),
        (14, "constant", "4"),
        (15, "operator", "(len(blocks) + count)"),
        (16, "return None", "return None"),
    }
    for fault in faults_of(SOURCE):
        changed = fault.applied(SOURCE)
        compile(changed, "a module", "exec")
        assert changed != SOURCE


def test_the_fastest_tests_of_a_line_are_selected(
    tmp_path: Path,
) -> None:
    file = tmp_path / "product.py"
    data = coverage.CoverageData(str(tmp_path / "coverage"))
    for context, arcs in {
        "tests/test_a.py::slow": [(1, 2), (2, 3)],
        "tests/test_a.py::fast": [(1, 2)],
        "tests/test_a.py::broken": [(1, 2)],
        "tests/test_b.py::first (setup)": [(2, 4)],
        "tests/test_c.py::one (call)": [(4, 5)],
        "": [(6, 7)],
    }.items():
        data.set_context(context)
        data.add_arcs({str(file): arcs})
    data.write()
    seconds = {"tests/test_a.py::slow": 25.0, "tests/test_a.py::fast": 1.0, "tests/test_b.py::first": 3.0}
    seconds |= {"tests/test_b.py::second": 2.0, "tests/test_c.py::one": 1.0, "tests/test_c.py::two": 1.0}
    phases = [(node_id, time, "passed") for node_id, time in seconds.items()]
    phases += [("tests/test_a.py::broken", 0.5, "failed"), ("tests/test_a.py::broken", 0.1, "passed")]
    (tmp_path / "seconds").write_text("\n".join(map(json.dumps, phases)))
    tests = TestMap(tmp_path / "coverage", tmp_path / "seconds", tmp_path)
    assert tests.select("product.py", 2).node_ids == (
        *("tests/test_a.py::fast", "tests/test_a.py::slow"),
        *("tests/test_b.py::second", "tests/test_b.py::first"),
    )
    assert tests.select("product.py", 5).node_ids == ("tests/test_c.py::one",)
    assert set(tests.select("product.py", 7).node_ids) == set(seconds) - {"tests/test_c.py::two"}
    assert tests.select("product.py", 8).node_ids == ()
