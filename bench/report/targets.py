"""Targets of benchmarks, from `bench/targets.toml`, and where results stand."""

import json
import os
import tomllib
from pathlib import Path
from typing import Any

from engine.native import cpu_class

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
# Folders of results: each class of CPUs has its own, so that none overwrites another's.
DEVICES = (*cpu_class.NAMES, "other-cpu", "gpu")
# Results of simulations stand beside these folders.
SIMULATED = "simulated"


def device_of(benchmark: str) -> str:
    """Return the folder of a benchmark's results on this machine."""
    if benchmark == "gpu":
        return "gpu"
    try:
        return cpu_class.select(os.environ.get(cpu_class.VARIABLE) or "auto").name
    except cpu_class.KernelsUnavailable:
        return "other-cpu"


def results_of(benchmark: str, folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """Return a benchmark's results by device, in the order of DEVICES. Those of no device are `simulated`.

    Raises ValueError for results of a dry run, whose figures mean nothing.
    """
    paths = {device: path_of(benchmark, device, folder) for device in (*DEVICES, SIMULATED)}
    return {device: _read(path) for device, path in paths.items() if path.exists()}


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    if found.get("dry"):
        raise ValueError(f"{path} is of a dry run, whose figures mean nothing: remove it")
    return found


def path_of(benchmark: str, device: str, folder: Path = RESULTS) -> Path:
    """Return the file of a benchmark's results."""
    return (folder if device == SIMULATED else folder / device) / f"{benchmark}.json"


def targets() -> dict[str, dict[str, Any]]:
    """Return `bench/targets.toml`: for each benchmark its title and its targets by metric."""
    return tomllib.loads((ROOT / "bench" / "targets.toml").read_text())
