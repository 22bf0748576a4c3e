"""One part of the check as a process: `python -m bench.gpu_check.part NAME UNTIL [--dry] DESCRIPTOR`.

It writes its notes to the descriptor, and begins nothing new after UNTIL, a moment of the monotonic clock.
"""

import os
import sys
from importlib import import_module

import torch

from bench.gpu_check import DRY
from bench.gpu_check.budgets import BUDGETS, Deadline
from bench.gpu_check.notes import Notes

if DRY:
    import tests.engine.triton_case  # noqa: F401 - with it the interpreter is a third faster

DEVICE = torch.device("cpu" if DRY else "cuda")


def main(name: str, until: float, descriptor: int) -> None:
    """Run a part, and record its failures. Each is a module with `measure`, and `FULL` and `SMALL` sizes."""
    assert name in BUDGETS, f"there is no part {name!r}; they are {', '.join(BUDGETS)}"
    with os.fdopen(descriptor, "w") as file:
        notes = Notes(file)
        with notes.kept(name), torch.inference_mode():
            found = import_module(f"bench.gpu_check.parts.{name}")
            found.measure(found.SMALL if DRY else found.FULL, DEVICE, notes, Deadline(until))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[-1]))
