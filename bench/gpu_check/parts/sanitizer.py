"""Small cases under compute-sanitizer: accesses outside of memory, and races. Without the tool they run alone."""

import os
from collections.abc import Sequence
from typing import NamedTuple

import torch

from bench.gpu_check.budgets import Deadline
from bench.gpu_check.notes import Notes
from bench.gpu_check.tools.children import failures_in, part, printed_by
from bench.gpu_check.tools.reports import errors_of, last_line, path_of

TOOL = "compute-sanitizer"
_SHOWN = 6000


class SanitizerCheck(NamedTuple):
    """A check of the tool on the small cases of a part. Tensors are allocated apart where nothing is recorded."""

    name: str
    check: str
    part: str
    apart: bool


FULL = (
    SanitizerCheck("memcheck_of_kernels", "memcheck", "exactness", apart=True),
    SanitizerCheck("memcheck_of_recorded_steps", "memcheck", "smoke", apart=False),
    SanitizerCheck("racecheck_of_kernels", "racecheck", "exactness", apart=True),
)
SMALL = (SanitizerCheck("memcheck_of_recorded_steps", "memcheck", "smoke", apart=False),)


def measure(checks: Sequence[SanitizerCheck], device: torch.device, notes: Notes, deadline: Deadline) -> None:
    """Run the checks, each with its share of the time; a row has the errors, None if the tool is absent or slow."""
    tool = path_of(TOOL)
    notes.raw("sanitizer", tool or "absent")
    if tool is None:
        print(f"{TOOL} is absent: its errors are not measured", flush=True)
    for place, one in enumerate(checks):
        with notes.kept(f"sanitizer, {one.name}"):
            share = deadline.part(1 / (len(checks) - place)).left()
            _check(one, tool, share, "--small" if device.type == "cuda" else "--dry", notes)


def _check(one: SanitizerCheck, tool: str | None, seconds: float, sizes: str, notes: Notes) -> None:
    # Calls that the driver refuses, such as an allocation while a graph is recorded, are the program's to see.
    before = [tool, "--tool", one.check, "--report-api-errors", "no"] if tool else []
    environment = {**os.environ, **({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if one.apart else {})}
    printed, status = printed_by([*before, *part(one.part, seconds, sizes)], seconds, environment)
    notes.raw(f"sanitizer_{one.name}", {"status": status, "printed": printed[-_SHOWN:]})
    errors = errors_of(printed)
    notes.row(f"sanitizer_{one.name}_errors", errors, "errors")
    assert not errors, f"{errors} errors: see raw"
    assert status is not None, f"it did not end in {seconds:.0f} s"
    assert status == 0, f"it ended with {status}: {last_line(printed)}"
    assert tool is None or errors is not None, f"it printed no summary of errors: {last_line(printed)}"
    # A graph is not recorded while each tensor is an allocation of its own.
    assert one.apart or not failures_in(printed), failures_in(printed)
