"""The file with what became of each case: one line a case, sorted, so that differences are readable."""

import json
from collections.abc import Collection, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.model_types.judgement import Judgement

RESULTS = Path(__file__).parents[2] / "docs" / "model-types.json"


def lines_of(path: Path) -> dict[str, dict[str, Any]]:
    """Return the line of each case of a file by its name; none without a file."""
    return {line["case"]: line for line in json.loads(path.read_text())["cases"]} if path.exists() else {}


def write_results(path: Path, judged: Mapping[str, Judgement], commit: str, model_types: Collection[str] = ()) -> None:
    """Write the cases of a whole sweep, or only those of some types: then the others' lines stay as they are.

    Lines name their commit where it is not that of the last whole sweep.
    """
    lines = {name: _line(name, judgement) for name, judgement in judged.items()}
    head = {"transformers": version("transformers"), "commit": commit}
    if model_types:
        before = json.loads(path.read_text())
        kept = {name: line for name, line in lines_of(path).items() if _type(name) not in model_types}
        of_commit = {} if before["commit"] == commit else {"commit": commit}
        lines = kept | {name: line | of_commit for name, line in lines.items() if _type(name) in model_types}
        head = {name: before[name] for name in head}
    path.write_text(_text(head, [lines[name] for name in sorted(lines)]))


def _type(name: str) -> str:
    return name.partition(":")[0]


def _text(head: Mapping[str, str], lines: list[dict[str, Any]]) -> str:
    shown = ",\n".join(f"    {json.dumps(line)}" for line in lines)
    begin = "".join(f"  {json.dumps(name)}: {json.dumps(value)},\n" for name, value in head.items())
    return f'{{\n{begin}  "cases": [\n{shown}\n  ]\n}}\n'


def _line(name: str, judgement: Judgement) -> dict[str, Any]:
    """Return the fields that say something."""
    return {"case": name} | {field: value for field, value in judgement._asdict().items() if value not in ("", 0, ())}
