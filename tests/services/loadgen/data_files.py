"""Recorded workloads, which are not part of the project: without them their tests are skipped."""

import os
from pathlib import Path

import pytest

_VARIABLE = "QUIRE_DATA"
_DEFAULT = Path(__file__).parents[4] / "shared" / "data"


def data_file(name: str) -> Path:
    """Return a file of the folder in QUIRE_DATA, by default shared/data next to the project, or skip the test."""
    path = Path(os.environ.get(_VARIABLE, _DEFAULT)) / name
    if not path.exists():
        pytest.skip(f"no {name}: {_VARIABLE} names no folder with it")
    return path
