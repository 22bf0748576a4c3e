"""The file of results has a line for each case, and is rewritten in part."""

import json
from pathlib import Path

from tests.model_types.judgement import Judgement
from tests.model_types.results import lines_of, write_results

WHOLE = {
    "llama": Judgement("equal", tokens=20),
    "bloom": Judgement("refused", "ALiBi"),
    "llama: YaRN": Judgement("equal"),
}


def test_a_whole_sweep_is_sorted_and_has_a_line_a_case(tmp_path: Path) -> None:
    write_results(tmp_path / "types.json", WHOLE, "abc")
    lines = (tmp_path / "types.json").read_text().splitlines()
    assert [json.loads(line.strip().rstrip(","))["case"] for line in lines if '"case"' in line] == sorted(WHOLE)
    assert lines_of(tmp_path / "types.json")["llama"] == {"case": "llama", "outcome": "equal", "tokens": 20}
    assert json.loads((tmp_path / "types.json").read_text())["commit"] == "abc"


def test_a_sweep_of_some_types_changes_their_lines_only(tmp_path: Path) -> None:
    path = tmp_path / "types.json"
    write_results(path, WHOLE, "abc")
    write_results(path, {"llama": Judgement("wrong", "alone")}, "def", ["llama"])
    assert lines_of(path) == {
        "bloom": {"case": "bloom", "outcome": "refused", "reason": "ALiBi"},
        "llama": {"case": "llama", "outcome": "wrong", "reason": "alone", "commit": "def"},
    }
    assert json.loads(path.read_text())["commit"] == "abc"
