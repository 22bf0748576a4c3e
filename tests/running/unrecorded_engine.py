"""`python -m tests.running.unrecorded_engine engine ARGUMENTS...` is `quire engine` that records steps, which fails.

The second of its sizes is refused, as by a GPU without memory.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from engine.gpu.graphs import Result, Run
from services.cli.main import main
from services.engine.startup import assembly
from services.engine.startup.backends import BackendChoice, BackendOptions, Measure, choose_backend, record_steps

MESSAGE = "CUDA out of memory. Tried to allocate 20.00 MiB."


@dataclass
class Refusing:
    """A recorder that captures one function, and refuses the next."""

    captured: list[object] = field(default_factory=list)

    def __call__(self, run: Run[Result], /) -> tuple[Callable[[], None], Result]:
        if self.captured:
            raise torch.OutOfMemoryError(MESSAGE)
        self.captured.append(run)
        return lambda: None, run()


def _choose_backend(options: BackendOptions, measure: "Measure | None" = None) -> BackendChoice:
    return record_steps(options, choose_backend(options, measure), Refusing())


if __name__ == "__main__":
    assembly.choose_backend = _choose_backend
    main()
