"""One part of the check as a process: `python -m bench.gpu_check.part NAME UNTIL [--dry] [--small] DESCRIPTOR`.

It writes its notes to the descriptor, and begins nothing new after UNTIL, a moment of the monotonic clock. `--small`
runs small cases on a GPU.
"""

import faulthandler
import os
import sys
import time
from importlib import import_module

from bench.gpu_check import DRY
from bench.gpu_check.budgets import Deadline
from bench.gpu_check.notes import Notes
from bench.gpu_check.processes import bear_lost_output

_SMALL = DRY or "--small" in sys.argv[1:]


def main(name: str, until: float, descriptor: int) -> None:
    """Run a part, and record its failures. Each is a module with `measure`, and `FULL` and `SMALL` sizes."""
    # Where a part hangs is not known else, and the next GPU may be far.
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(1.0, until - time.monotonic()))
    with os.fdopen(descriptor, "w", closefd=descriptor > sys.stderr.fileno()) as file:
        notes = Notes(file)
        with notes.kept(name):
            _run(name, Deadline(until), notes)


def _run(name: str, deadline: Deadline, notes: Notes) -> None:
    """Import what computes only here, so that a failure or a hang of its import belongs to the part."""
    import torch

    if DRY:
        import tests.engine.triton_case  # noqa: F401 - with it the interpreter is a third faster
    found = import_module(f"bench.gpu_check.parts.{name}")
    with torch.inference_mode():
        device = torch.device("cpu" if DRY else "cuda")
        found.measure(found.SMALL if _SMALL else found.FULL, device, notes, deadline)


if __name__ == "__main__":
    bear_lost_output()
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[-1]))
    # All is written. Libraries that crash or hang while the interpreter ends make no failure of the part.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
