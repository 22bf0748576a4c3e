"""The results of the calls in one file, as the report reads it: each row has the call that it came from."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.gpu_check.calls.budgets import CALLS

Results = dict[str, Any]


def folder_of(call: int, folder: Path) -> Path:
    """Return the folder of a call's own results."""
    return folder / f"first-{call}"


def merge(folder: Path) -> list[str]:
    """Write gpu.json from the results of all calls that are in a folder, and return what could not be read.

    Rows of gpu.json that no call measured, of `make gpu-check`, remain.
    """
    found, unread = {}, []
    for call in CALLS:
        path = folder_of(call, folder) / "gpu.json"
        try:
            found[call] = json.loads(path.read_text())
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            unread.append(f"{path}: {error}")
    earlier = _earlier(folder / "gpu.json")
    if len({one.get("dry", False) for one in (*found.values(), earlier) if one}) > 1:
        return [*unread, f"{folder}: it has results of a GPU and of dry runs"]
    if found:
        _write(folder / "gpu.json", merged(found, earlier))
    return unread


def merged(found: Mapping[int, Results], earlier: Results) -> Results:
    """Return one result: what describes the run is that of the last call, and a later row replaces an earlier one."""
    last = found[max(found)]
    rows = {row["metric"]: row for row in earlier.get("rows", []) if "call" not in row}
    raw: Results = {}
    failures: dict[str, str] = {}
    for call, one in sorted(found.items()):
        rows |= {row["metric"]: row | {"call": call} for row in one["rows"]}
        raw |= one["raw"]
        failures |= {f"call {call}, {what}": reason for what, reason in one["failures"].items()}
    calls = {str(call): {name: one.get(name) for name in _OF_A_CALL} for call, one in sorted(found.items())}
    return last | {"rows": list(rows.values()), "raw": raw, "failures": failures, "calls": calls}


_OF_A_CALL = ("started", "commit", "hardware", "versions")


def _earlier(path: Path) -> Results:
    try:
        found: Results = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found


def _write(path: Path, result: Results) -> None:
    unfinished = path.with_suffix(f".json.{os.getpid()}.unfinished")
    unfinished.write_text(json.dumps(result, indent=2) + "\n")
    unfinished.replace(path)
