"""One of each first: a swap each way, the sampler against the CPU, a decoding graph, a step with a prompt by pieces.

The seconds include the compilation of the kernels. compute-sanitizer runs this part with small cases.
"""

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from bench.gpu_check.budgets import Deadline
from bench.gpu_check.llama_engine import LLAMA_3_8B
from bench.gpu_check.notes import Notes
from bench.gpu_check.parts import exactness
from bench.gpu_check.parts.exactness import ExactnessSizes

FULL = replace(
    exactness.FULL,
    rows=16,
    sampled=(4, 128256),
    config=LLAMA_3_8B | {"num_hidden_layers": 1},
    batches=(1,),
    pieces=(16,),
    mixed=((13,),),
)
SMALL = replace(exactness.SMALL, batches=(1,))


def measure(sizes: ExactnessSizes, device: torch.device, notes: Notes, deadline: Deadline) -> None:
    """Run each, and compare its result as the part `exactness` does."""
    own = notes.suffixed("_smoke")
    launches: dict[str, Callable[[], object]] = {
        "swap": lambda: _swap(sizes, device, own),
        "sampling": lambda: exactness.sampling(sizes, device, own),
        "recorded_steps": lambda: exactness.recorded_steps(sizes, device, own),
    }
    for name, launch in launches.items():
        if deadline.passed():
            return
        with notes.kept(f"smoke, {name}"):
            begun = time.perf_counter()
            launch()
            notes.row(f"smoke_{name}_seconds", round(time.perf_counter() - begun, 2), "s")


def _swap(sizes: ExactnessSizes, device: torch.device, notes: Notes) -> None:
    differs = exactness.swap_error(sizes.rows, device)
    notes.row("swap_error", differs, "ratio", "the same blocks")
    assert not differs, "swapped blocks differ"
