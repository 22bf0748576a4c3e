"""A real engine whose kernels only wait: everything outside the kernels is executed.

`python kernelless_engine.py STEP_SECONDS ARGUMENTS...` runs `quire engine ARGUMENTS...` of the code on the path. A step
waits STEP_SECONDS, and its logits prefer the same token in all rows; sampling is real.
"""

import os

# As in the engine's process, and before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

TOKEN_ID = 100
_ROWS = 256  # of the logits that are made once; steps with fewer rows take a part of them


def main(step_seconds: float, arguments: list[str]) -> None:
    """Replace the kernels' step once the model is loaded and verified, and run the command."""
    from services.cli.main import cli
    from services.engine.startup import assembly

    assemble = assembly.assemble

    with ExitStack() as replaced:  # until the command ends: a context that nothing refers to ends at once

        def assemble_without_kernels(settings: Any) -> Any:
            parts = assemble(settings)
            replaced.enter_context(without_kernels(step_seconds))
            return parts

        assembly.assemble = assemble_without_kernels
        cli(["engine", *arguments], auto_envvar_prefix="QUIRE")


@contextmanager
def without_kernels(step_seconds: float) -> Iterator[None]:
    """Let the kernels of this process wait instead of computing: every row's likeliest token is TOKEN_ID."""
    from engine.native.kernels import Kernels, NativeModel

    def wait(_: Any, model: NativeModel, __: Any, ___: Any, tokens: Any, ____: int) -> Any:
        time.sleep(step_seconds)
        return _logits(len(tokens[2]), model.vocabulary)

    step = Kernels.step
    Kernels.step = wait  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Kernels.step = step  # type: ignore[method-assign]


@cache
def _logits(rows: int, vocabulary: int) -> Any:
    """Return the first rows of one tensor: making one for each number of rows would be measured, too."""
    import torch

    if rows < _ROWS:
        return _logits(_ROWS, vocabulary)[:rows]
    made = torch.zeros(rows, vocabulary)
    made[:, TOKEN_ID] = 1.0
    return made


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
