"""One part of the check as a process: `python -m bench.gpu_check.part NAME [--dry] DESCRIPTOR`.

It writes its notes to the descriptor.
"""

import os
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch

from bench.gpu_check import DRY
from bench.gpu_check.notes import Notes

if DRY:
    import tests.engine.triton_case  # noqa: F401 - with it the interpreter is a third faster

Measure = Callable[[Notes], None]


class Limited(NamedTuple):
    """A part: its time limit in seconds, and the function that loads it in its process."""

    seconds: float
    load: Callable[[], Measure]


def _suite() -> Measure:
    from bench.gpu_check import suite

    return suite.measure


def _kernels(name: str) -> Callable[[], Measure]:
    def load() -> Measure:
        from bench.gpu_check import kernels

        return kernels.part(name, DEVICE, small=DRY)

    return load


def _llama() -> Measure:
    from bench.gpu_check import llama

    return lambda notes: llama.measure(llama.SMALL if DRY else llama.FULL, DEVICE, notes)


DEVICE = torch.device("cpu" if DRY else "cuda")
# In the order in which they run.
PARTS = {
    "tests": Limited(150, _suite),
    "uniform": Limited(60, _kernels("uniform")),
    "ragged": Limited(45, _kernels("ragged")),
    "short": Limited(30, _kernels("short")),
    "prefill": Limited(45, _kernels("prefill")),
    "copies": Limited(45, _kernels("copies")),
    "llama": Limited(150, _llama),
}


def main(name: str, descriptor: int) -> None:
    """Run a part, and record its failures."""
    with os.fdopen(descriptor, "w") as file:
        notes = Notes(file)
        with notes.kept(name), torch.inference_mode():
            PARTS[name].load()(notes)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[-1]))
