"""Targets of benchmarks, from `bench/targets.toml`, and their comparison with values."""

import tomllib
from collections.abc import Callable
from operator import ge, le, lt
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
_MEETS: dict[str, Callable[[float, float], bool]] = {"less": lt, "at most": le, "more": ge}


def targets() -> dict[str, dict[str, Any]]:
    """Return `bench/targets.toml`: for each benchmark its title and its targets by metric."""
    return tomllib.loads((ROOT / "bench" / "targets.toml").read_text())


def met(value: float | None, target: dict[str, Any] | None) -> bool | None:
    """Return True if a value meets its target: None without a target, False if it was not measured."""
    if target is None:
        return None
    if value is None:
        return False
    return _MEETS[target["better"]](value, target["target"])
