"""int8 with a scale for each output, as bitsandbytes stores it. It imports no torch.

A weight is `weight` * `SCB` / 127 ("LLM.int8()", Dettmers et al. 2022). What is above a threshold when the model runs
are activations.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from engine.errors import ModelUnsupported
from engine.native.formats.grouped import GroupedWeights
from engine.native.formats.quantized.scheme import Coded, Matrices, by_module, check_matrix, check_part
from engine.native.formats.tensors import TypedTensor

_PARTS = ("weight", "SCB", "weight_format")
_ROWS = 0  # the one layout that is written since 2024; others are tiles of GPUs
_INPUTS = 32  # to whose multiples the kernels' groups add up


class Bnb8Scheme:
    """A declaration of int8."""

    label = "bitsandbytes int8"

    def matrices(self, stored: Mapping[str, TypedTensor]) -> Matrices:
        """Return the quantized matrices of a folder. Raises ModelUnsupported, naming the tensor, as `Scheme`."""
        coded, parts = dict[str, Coded](), set[str]()
        for module, found in by_module(stored, _PARTS).items():
            if set(found) == {"weight"} and stored[found["weight"]].get_dtype() != "I8":
                continue
            if lacking := next((part for part in _PARTS[:2] if part not in found), None):
                present = next(iter(found.values()))
                raise ModelUnsupported(f"its files lack tensor {module}.{lacking}, although they have {present}")
            coded[found["weight"]] = Coded(_codes(module, found, stored))
            parts.update(found.values())
        return Matrices(coded, frozenset(parts))


def _codes(module: str, parts: Mapping[str, str], stored: Mapping[str, TypedTensor]) -> "Bnb8Codes":
    weight, scales = (stored[parts[part]] for part in _PARTS[:2])
    outputs, _ = check_matrix(parts["weight"], weight, ("I8",))
    check_part(parts["SCB"], scales, (outputs,), ("F32",))
    if (layout := stored.get(f"{module}.weight_format")) is not None:
        check_part(parts["weight_format"], layout, (), ("U8",))
    return Bnb8Codes(module, weight, scales, layout)


class Bnb8Codes:
    """A matrix in int8."""

    def __init__(self, module: str, weight: TypedTensor, scales: TypedTensor, layout: TypedTensor | None) -> None:
        """`layout` is the number of a layout, which is 0 also if there is none."""
        self._module, self._weight, self._scales, self._layout = module, weight, scales, layout

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        outputs, inputs = self._weight.get_shape()
        return outputs, inputs

    def grouped(self, begin: int, end: int) -> GroupedWeights | None:
        """Return outputs with a scale for each; None if no kernel has such inputs."""
        return None if self.shape[1] % _INPUTS else self._weights(begin, end)

    def values(self, begin: int, end: int) -> npt.NDArray[np.float32]:
        """Return the products, float32. Raises ModelUnsupported, with the name, for another layout of the codes."""
        with np.errstate(invalid="ignore"):  # callers refuse what is not finite
            return self._weights(begin, end).dense()

    def _weights(self, begin: int, end: int) -> GroupedWeights:
        if self._layout is not None and (layout := int(self._layout[...].item())) != _ROWS:
            name = f"{self._module}.weight_format"
            raise ModelUnsupported(f"its tensor {name} is {layout}, the layout of a GPU's tiles: only 0 is served")
        codes = self._weight[begin:end].numpy().view(np.uint8) ^ np.uint8(128)  # signed, plus 128
        scales = np.asarray(self._scales[begin:end].numpy(), np.float32)[:, None] / np.float32(127)
        return GroupedWeights(codes, scales, None, 128, 8, codes.shape[1])
