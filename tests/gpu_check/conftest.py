"""Older packages, as a GPU machine without a package index may have them. They are installed once, below build/."""

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

BUILD = Path(__file__).parents[2] / "build" / "older-packages"
TRITON = "triton==3.6.0"  # torch 2.11, which GPU machines often have, requires it
# Older than generated code and pyproject.toml ask for. The interpreter of this Triton needs NumPy before 2.4.
OTHERS = (
    "grpcio==1.80.0",
    "protobuf==6.31.1",
    "transformers==5.17.0",
    "huggingface_hub==1.33.0",
    "numpy==2.3.5",
)


@pytest.fixture(scope="session")
def older_triton() -> Path:
    """A folder with an older Triton only."""
    return installed("--no-deps", TRITON)


@pytest.fixture(scope="session")
def older_packages(older_triton: Path) -> str:
    """Folders with all older packages, as a part of PYTHONPATH."""
    return f"{older_triton}:{installed(*OTHERS)}"


def installed(*arguments: str) -> Path:
    """Return a folder with packages. Skips the test where they cannot be had."""
    folder = BUILD / hashlib.sha256(" ".join((sys.version, *arguments)).encode()).hexdigest()[:12]
    if not folder.exists():
        BUILD.mkdir(parents=True, exist_ok=True)
        unfinished = folder.with_suffix(".unfinished")
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-compile", "--upgrade"]
        command += ["--target", str(unfinished), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"{arguments[-1]} cannot be had: {done.stderr[-500:]}")
        unfinished.rename(folder)
    return folder
