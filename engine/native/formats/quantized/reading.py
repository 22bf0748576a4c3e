"""The tensors of a folder with quantized weights, by the names that they have in a folder without."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from engine.errors import ModelUnsupported
from engine.native.formats.coded import CodedMatrix
from engine.native.formats.quantized.declared import declared
from engine.native.formats.quantized.methods import scheme_by
from engine.native.formats.tensors import StoredTensor

_FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' names of types
# Suffixes of tensors that are parts of quantized matrices.
_PARTS = ("qweight", "qzeros", "g_idx", "weight_packed", "weight_scale", "weight_scale_inv", "SCB", "W_q")


class Handles:
    """Tensors that are not read yet, as a file of them."""

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self._tensors = tensors

    def keys(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._tensors)

    def get_slice(self, name: str) -> StoredTensor:
        """Return a tensor's handle."""
        return self._tensors[name]

    def get_tensor(self, name: str) -> torch.Tensor:
        """Read a tensor."""
        return self._tensors[name][...]


def decoded(folder: Path, files: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Return the file of each tensor, of which quantized matrices are CodedMatrix with values of `dtype`.

    `files` has the file of each stored tensor. Raises ModelUnsupported, naming the tensor, if weights are codes that
    the folder does not declare: without their scales, they would be taken for values.
    """
    try:
        found = declared(folder)
    except (OSError, ValueError, RecursionError):  # reported where the configuration is needed
        found = None
    if found is None:
        _check_plain(files)
        return dict(files)
    stored = {name: file.get_slice(name) for name, file in files.items()}
    matrices = scheme_by(found).matrices(stored)
    plain = {name: file for name, file in files.items() if name not in matrices.parts}
    _check_plain(plain)
    coded = {name: CodedMatrix(one.codes, dtype, one.place) for name, one in matrices.coded.items()}
    return plain | dict.fromkeys(coded, Handles(coded))


def _check_plain(files: Mapping[str, Any]) -> None:
    for name, file in files.items():
        suffix = name.rpartition(".")[2]
        if suffix in _PARTS:
            raise ModelUnsupported(
                f"its tensor {name} is a part of quantized weights, but no file of the folder declares how it is used"
            )
        if suffix == "weight" and (kind := file.get_slice(name).get_dtype()) not in _FLOATS:
            raise ModelUnsupported(f"its tensor {name} has type {kind}, but config.json declares no quantization")
