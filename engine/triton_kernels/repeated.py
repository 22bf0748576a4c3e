"""Launches that are repeated for other layers, past Triton's search for the compiled kernel.

Triton's own launch binds, classifies and hashes every argument: 10 to 20 us of Python. From layer to layer of a step
only a few arguments change, and not their classes.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

Argument: TypeAlias = "torch.Tensor | int | float | None"


class KernelLaunch:
    """A launched kernel with its arguments, except the changing ones, which it does not keep alive."""

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        changing: Mapping[str, Argument],
        fixed: Mapping[str, Argument],
        **constants: Any,
    ) -> None:
        """Launch a kernel, whose parameters are in this order, on the current stream."""
        self._kernel = kernel
        self._grid = grid
        self._names = tuple(changing)
        self._classes = tuple(map(_class_of, changing.values()))
        self._fixed = tuple(fixed.values())
        self._constants = constants
        compiled = kernel[grid](*changing.values(), *self._fixed, **constants)
        self._run = None
        if compiled is not None:  # None: under the interpreter
            in_signature = kernel.arg_names[len(changing) + len(fixed) :]
            self._values = (*self._fixed, *[constants[name] for name in in_signature])
            self._run = compiled[(*grid, 1, 1)[:3]]

    def again(self, arguments: Mapping[str, Argument]) -> None:
        """Launch it with other changing arguments, found here by their names."""
        changing = [arguments[name] for name in self._names]
        if self._run is not None and tuple(map(_class_of, changing)) == self._classes:
            self._run(*changing, *self._values)
        else:
            self._kernel[self._grid](*changing, *self._fixed, **self._constants)


def _class_of(argument: Argument) -> object:
    """Return what Triton compiles a kernel for: other code may follow from another class."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, argument.bit_length() > 31
    return argument if argument is None else type(argument)
