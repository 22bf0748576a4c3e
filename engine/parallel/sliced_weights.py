"""Reads slices of tensors from a model's safetensors files, without reading the rest."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from engine.errors import ModelUnsupported

ALL = slice(None)


class SlicedWeights:
    """The weights in the files of a folder, on one device in one type."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        """Open the files of a folder. Raises ModelUnsupported if there are none."""
        files: list[Any] = [safe_open(path, framework="pt") for path in sorted(folder.glob("*.safetensors"))]
        if not files:
            raise ModelUnsupported(f"{folder.name}: tensor_parallel requires weights in safetensors files")
        self._files = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - it is no dictionary
        self._dtype, self._device = dtype, device
        self.read_bytes = 0
        """Bytes read so far, as stored in the files."""

    def tensor(self, name: str, rows: slice = ALL, columns: slice | None = None) -> torch.Tensor:
        """Read rows and columns of a tensor, or rows of a vector. Raises ModelUnsupported if no file has it."""
        found = self.optional(name, rows, columns)
        if found is None:
            raise ModelUnsupported(f"its weights have no tensor {name}")
        return found

    def optional(self, name: str, rows: slice = ALL, columns: slice | None = None) -> torch.Tensor | None:
        """Read rows and columns of a tensor; None if no file has it."""
        file = self._files.get(name)
        if file is None:
            return None
        stored = file.get_slice(name)
        part: torch.Tensor = stored[rows] if columns is None else stored[rows, columns]
        self.read_bytes += part.nbytes
        return part.to(self._device, self._dtype).contiguous()
