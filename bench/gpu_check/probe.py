"""Asks for the GPU in a process with a time limit: where the driver hangs, the import of torch may not return."""

import json
import os
import sys
from typing import Any

from bench.gpu_check import DRY
from bench.report.targets import ROOT
from services.loadgen.report import machine

_SECONDS = 90.0  # torch is read from a cold disk
_PROGRAM = """
import json, torch
from services.loadgen.report import machine
if torch.cuda.is_available():
    torch.ones(1, device="cuda").sum().item()
print(json.dumps(machine.hardware()))
"""
SILENT = "nvidia-smi does not answer"
# After a failure: whether the driver still answers, and who has the memory.
_STATE = (
    "name",
    "memory.used",
    "memory.total",
    "clocks.sm",
    "temperature.gpu",
    "clocks_event_reasons.active",
    "pstate",
)


def hardware(seconds: float = _SECONDS) -> dict[str, Any]:
    """Describe the machine and its GPU, which has computed once. Exits if there is none, or none that answers."""
    if DRY:
        return machine.hardware() | {"device": "gpu", "gpu": "interpreter"}
    printed = machine.output_of([sys.executable, "-c", _PROGRAM], ROOT, seconds)
    if printed is None:
        sys.exit(f"torch cannot be imported, or the GPU does not compute, within {seconds:.0f} s: see nvidia-smi")
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    if "gpu" not in found:
        sys.exit("no GPU found: DRY=1 runs small cases without one")
    return found | {"device": "gpu"}


def state() -> str:
    """Return what nvidia-smi says of the GPU now."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or DRY:
        return "no GPU"
    command = ["nvidia-smi", f"--query-gpu={','.join(_STATE)}", "--format=csv,noheader"]
    return machine.output_of(command) or SILENT
