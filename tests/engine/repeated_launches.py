"""Launches the attention of three layers on a GPU that only notes its launches, and prints what it notes.

Run it as a module, without TRITON_INTERPRET. It prints `same LAUNCHES` if layers that repeat the launches of the layer
before launch what they would launch anew, else `different`, and two times: seconds of Python in a layer's launches,
anew and repeated, where the driver takes none.
"""

import sys
import time
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton

from engine.attention.backend import PagedBatch, Scoring
from engine.attention.cache import CacheGeometry
from engine.gpu.triton_backend import TritonBackend
from engine.schedule.request import Sampling
from engine.schedule.step_plan import Work
from tests.engine.compile_for_gpu import CPU, Driver

_LAYERS, _HEADS, _SIZE, _BLOCK = 3, 8, 64, 16
_REPETITIONS = 60
_SCORING = Scoring(0.1)

Noted = list[tuple[Any, ...]]


class NotingDriver(Driver):
    """Loads nothing, and notes each launch: kernel, grid, and all arguments, tensors by their addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: Noted = []
        noted = self.noted

        class Launcher:
            def __init__(self, _source: Any, _metadata: Any) -> None:
                pass

            def __call__(self, *launch: Any) -> None:
                grid, function, arguments = launch[:3], launch[4], launch[9:]
                described = [one.data_ptr() if isinstance(one, torch.Tensor) else one for one in arguments]
                noted.append((function, grid, *described))

        self.launcher_cls = Launcher
        self.utils = SimpleNamespace(
            get_device_properties=lambda _: {"max_shared_mem": 227 << 10},
            load_binary=lambda name, binary, *_: (object(), (name, hash(binary)), 0, 0, 1024),
        )


class Layers:
    """A batch that decodes and has a prompt, and the rows of its queries and results."""

    def __init__(self) -> None:
        geometry = CacheGeometry.uniform(_LAYERS, _HEADS, _SIZE)
        self._backend = TritonBackend(geometry, _BLOCK, 8, torch.bfloat16, CPU)
        work = [Work(1, (0,), 20, (1, 2), True, Sampling()), Work(2, (0,) * 9, 0, (3,), True, Sampling())]
        self._batch = PagedBatch.of(work, _BLOCK, CPU)
        self._query, self._output = (torch.zeros(10, 4 * _HEADS, _SIZE, dtype=torch.bfloat16) for _ in range(2))

    def attend(self, layer: int, *, anew: bool) -> None:
        if anew and self._backend._listed:
            self._backend._listed.launched.clear()
        self._backend.attend_into(layer, self._query, self._output, self._batch, _SCORING)


def seconds_of(run: Callable[[], None]) -> float:
    """Return the median of this thread's seconds."""
    found = []
    for _ in range(_REPETITIONS):
        begun = time.thread_time()
        run()
        found.append(time.thread_time() - begun)
    return median(found)


def main() -> None:
    driver = NotingDriver()
    triton.runtime.driver.set_active(driver)
    with patch("torch.cuda.get_device_properties", driver.properties):
        layers = Layers()
        launched: list[Noted] = []
        for anew in (True, False):
            layers.attend(0, anew=True)
            driver.noted.clear()
            for layer in range(1, _LAYERS):
                layers.attend(layer, anew=anew)
            launched.append(list(driver.noted))
        of_layers = [launched[0][: len(launched[0]) // 2], launched[0][len(launched[0]) // 2 :]]
        same = launched[0] == launched[1] and of_layers[0] != of_layers[1]
        sys.stdout.write(f"{'same' if same else 'different'} {len(launched[0])}\n")
        for anew in (True, False):
            sys.stdout.write(f"{seconds_of(lambda anew=anew: layers.attend(1, anew=anew)):.7f}\n")  # type: ignore[misc]


if __name__ == "__main__":
    main()
