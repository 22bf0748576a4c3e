"""The results of the calls in one file, as the report reads it: each row has the call that it came from."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.gpu_check.calls.budgets import CALLS
from bench.gpu_check.run import earlier_of, keep_earlier

Results = dict[str, Any]


def folder_of(call: int, folder: Path) -> Path:
    """Return the folder of a call's own results."""
    return folder / f"first-{call}"


def merge(folder: Path) -> list[str]:
    """Write gpu.json from the results of all calls that are in a folder; return what was not merged, with the reasons.

    Rows of gpu.json that no call measured, of `make gpu-check`, remain. So do rows that only an earlier run of a call
    has. A gpu.json that cannot be read gets another name.
    """
    path, unmerged = folder / "gpu.json", list[str]()
    found = {call: runs for call in CALLS if (runs := _runs_of(folder_of(call, folder) / "gpu.json", unmerged))}
    earlier = _read(path, unmerged)
    everything = [one for runs in found.values() for one in runs.values()] + ([earlier] if earlier else [])
    if len({one.get("dry", False) for one in everything}) > 1:
        return [*unmerged, f"{folder}: it has results of a GPU and of dry runs"]
    if found:
        if earlier is None:
            keep_earlier(path)
        try:
            _write(path, merged({call: united(runs) for call, runs in found.items()}, earlier or {}))
        except OSError as error:
            unmerged.append(f"{path}: {error.strerror}")
    return unmerged


def united(runs: Mapping[str, Results]) -> Results:
    """Return the newest result of one call, with the rows that only earlier runs have; those name their file."""
    *_, (newest, last) = runs.items()
    rows: Results = {}
    raw: Results = {}
    for name, one in runs.items():
        origin = {} if name == newest else {"file": name}
        rows |= {row["metric"]: row | origin for row in one["rows"] if row["value"] is not None or _is_new(row, rows)}
        raw |= one["raw"]
    return last | {"rows": list(rows.values()), "raw": raw}


def _is_new(row: Results, rows: Results) -> bool:
    return row["metric"] not in rows


def merged(found: Mapping[int, Results], earlier: Results) -> Results:
    """Return one result: what describes the run is that of the last call, and a later row replaces an earlier one."""
    last = found[max(found)]
    rows = {row["metric"]: row for row in earlier.get("rows", []) if "call" not in row}
    raw: Results = {}
    failures: dict[str, str] = {}
    for call, one in sorted(found.items()):
        rows |= {row["metric"]: row | {"call": call} for row in one["rows"]}
        raw |= one["raw"]
        failures |= {f"call {call}, {what}": reason for what, reason in (_unfinished(one) | one["failures"]).items()}
    calls = {str(call): {name: one.get(name) for name in _OF_A_CALL} for call, one in sorted(found.items())}
    return last | {"rows": list(rows.values()), "raw": raw, "failures": failures, "calls": calls}


_OF_A_CALL = ("started", "commit", "hardware", "versions", "parts", "ended")


def _unfinished(one: Results) -> dict[str, str]:
    """Return the parts that did not end, as failures: a run that was killed could not write them."""
    return {name: f"the call was ended: {state}" for name, state in one.get("parts", {}).items() if state != "ended"}


def _runs_of(path: Path, unmerged: list[str]) -> dict[str, Results]:
    """Return the results of a call's runs by the names of their files, oldest first."""
    read = {one.name: _read(one, unmerged) for one in (*earlier_of(path), path)}
    return {name: result for name, result in read.items() if result is not None}


def _read(path: Path, unmerged: list[str]) -> Results | None:
    try:
        return _checked(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        unmerged.append(f"{path}: {error.strerror if isinstance(error, OSError) else error}")
        return None


def _checked(found: Any) -> Results:
    """Return the results of a run. Raises ValueError naming the field that is no such thing."""
    if not isinstance(found, dict):
        raise ValueError("it is no object with rows")
    for name, kind in {"rows": list, "raw": dict, "failures": dict, "parts": dict}.items():
        if not isinstance(found.get(name, {} if name == "parts" else None), kind):
            raise ValueError(f"{name}: must be {'a list' if kind is list else 'an object'}")
    if not all(
        isinstance(row, dict) and isinstance(row.get("metric"), str) and "value" in row for row in found["rows"]
    ):
        raise ValueError("rows: each must be an object with a metric and a value")
    return found


def _write(path: Path, result: Results) -> None:
    unfinished = path.with_suffix(f".json.{os.getpid()}.unfinished")
    unfinished.write_text(json.dumps(result, indent=2) + "\n")
    unfinished.replace(path)
