"""Reads slices of tensors from a model's files, without reading the rest."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine.errors import ModelUnsupported
from engine.model.staging import Staging
from engine.native.formats.finite import check_finite
from engine.native.formats.stored import files_of

ALL = slice(None)


class SlicedWeights:
    """The weights in the files of a folder, on one device in one type.

    With `staging` they reach the device through its buffers, in the order of the calls; call `finish` after the last.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device, staging: Staging | None = None) -> None:
        """Open the files of a folder. Raises ModelUnsupported if there are none, or one is damaged."""
        self._files = files_of(folder, dtype)
        if not self._files:
            raise ModelUnsupported(f"{folder.name}: tensor_parallel requires weights in safetensors or GGUF files")
        self._dtype, self._device, self._staging = dtype, device, staging
        self._read: list[tuple[str, torch.Tensor]] = []  # until `finish`
        self.read_bytes = 0
        """Bytes read so far, as stored in the files, or as decoded."""

    def tensor(self, name: str, rows: slice = ALL, columns: slice | None = None) -> torch.Tensor:
        """Read rows and columns of a tensor, or rows of a vector. Raises ModelUnsupported if no file has it."""
        found = self.optional(name, rows, columns)
        if found is None:
            raise ModelUnsupported(f"its weights have no tensor {name}")
        return found

    def optional(self, name: str, rows: slice = ALL, columns: slice | None = None) -> torch.Tensor | None:
        """Read rows and columns of a tensor; None if no file has it."""
        if name not in self._files:
            return None
        stored = self._files[name].get_slice(name)
        part: torch.Tensor = stored[rows] if columns is None else stored[rows, columns]
        if self._staging is None:
            self.read_bytes += part.nbytes
            found = part.to(self._device, self._dtype).contiguous()
            self._read.append((name, found))
            return found
        place = torch.empty(part.shape, dtype=self._dtype, device=self._device)
        self._copy(name, part, place)
        return place

    def together(self, parts: Sequence[tuple[str, slice]]) -> torch.Tensor:
        """Read rows of several tensors into one, in this order: each into its place, so that no second copy is made.

        Raises ModelUnsupported if no file has one of the tensors, or if their rows differ in shape.
        """
        stored = [self._stored(name) for name, _ in parts]
        shapes = [one.get_shape() for one in stored]
        if len({tuple(shape[1:]) for shape in shapes}) > 1:
            raise ModelUnsupported(f"its tensors {', '.join(name for name, _ in parts)} have rows of different shapes")
        counts = [len(range(*rows.indices(shape[0]))) for (_, rows), shape in zip(parts, shapes, strict=True)]
        whole = torch.empty([sum(counts), *shapes[0][1:]], dtype=self._dtype, device=self._device)
        for one, (name, rows), place in zip(stored, parts, torch.split(whole, counts), strict=True):
            self._copy(name, one[rows], place)
        return whole

    def has(self, name: str) -> bool:
        """Return whether a file has a tensor."""
        return name in self._files

    def finish(self) -> None:
        """Wait for copies to the device, after the last tensor. Raises ModelUnsupported if weights are not finite."""
        if self._staging:
            self._staging.finish()
        read, self._read = self._read, []
        check_finite(read)

    def _stored(self, name: str) -> Any:
        if name not in self._files:
            raise ModelUnsupported(f"its weights have no tensor {name}")
        return self._files[name].get_slice(name)

    def _copy(self, name: str, part: torch.Tensor, place: torch.Tensor) -> None:
        self._read.append((name, place))
        self.read_bytes += part.nbytes
        if self._staging:
            self._staging.copy(part, place)
        else:
            place.copy_(part)
