"""The machine: versions, the card, the tools that are there, and how long imports take."""

import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.gpu_check.budgets import Deadline
from bench.gpu_check.notes import Notes
from bench.gpu_check.parts.ceilings import versions
from bench.gpu_check.tools.children import printed_by
from bench.gpu_check.tools.reports import path_of
from services.loadgen.report import machine

FULL = ("torch", "triton", "transformers", "grpc", "bench.gpu_check.llama_engine", "services.engine.startup.assembly")
SMALL = ("json",)
_TOOLS = ("nvidia-smi", "ncu", "compute-sanitizer", "nvcc", "gcc", "clang", "git")


def measure(modules: Sequence[str], device: torch.device, notes: Notes, deadline: Deadline) -> None:
    """Write what is there; then import each module in a process of its own. One that fails is named."""
    notes.raw("versions", versions(device))
    notes.raw("nvidia-smi", machine.output_of(["nvidia-smi"]))
    notes.raw("machine", _found())
    for module in modules:
        if deadline.passed():
            return
        with notes.kept(f"import of {module}"):
            begun = time.perf_counter()
            printed, status = printed_by([sys.executable, "-c", f"import {module}"], deadline.left(), os.environ)
            seconds = time.perf_counter() - begun
            assert status == 0, printed[-500:] or f"it ended with {status}"
            notes.row(f"import_{module.rpartition('.')[2]}_seconds", round(seconds, 2), "s")


def _found() -> dict[str, object]:
    """Return the tools, what Triton compiles its launchers with, and the disk."""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    caches = {name: value for name, value in os.environ.items() if name.endswith("_CACHE_DIR")}
    return {
        "tools": {tool: path_of(tool) for tool in _TOOLS},
        "python_headers": headers.exists(),
        "free_bytes": shutil.disk_usage("/tmp").free,
        "caches": caches,
    }
