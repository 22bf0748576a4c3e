"""Recorded workloads, which are not part of the project: tests that need one are skipped where it is not there."""

import os
from pathlib import Path

import pytest

_VARIABLE = "QUIRE_DATA"
_BESIDE = Path(__file__).parents[4] / "shared" / "data"


def data_file(name: str) -> Path:
    """Return a file of the folder that QUIRE_DATA names, or of the one beside the project; else skip the test."""
    path = Path(os.environ.get(_VARIABLE, _BESIDE)) / name
    if not path.exists():
        pytest.skip(f"no {name}: {_VARIABLE} names no folder with it")
    return path
