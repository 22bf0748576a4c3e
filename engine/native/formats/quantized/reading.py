"""The tensors of a folder with quantized weights, by the names that they have in a folder without."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from engine.native.formats.coded import CodedMatrix
from engine.native.formats.quantized.methods import matrices_of, scheme_of
from engine.native.formats.tensors import StoredTensor


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

    `files` has the file of each stored tensor. Raises ModelUnsupported as `matrices_of`.
    """
    scheme = scheme_of(folder) if (folder / "config.json").is_file() else None
    matrices = matrices_of(scheme, {name: file.get_slice(name) for name, file in files.items()})
    coded = {name: CodedMatrix(one.codes, dtype, one.place) for name, one in matrices.coded.items()}
    plain = {name: file for name, file in files.items() if name not in matrices.parts}
    return plain | dict.fromkeys(coded, Handles(coded))
