"""The weights of a Llama-shaped model by name, from transformers' modules or from the model's files."""

from collections.abc import Sequence
from pathlib import Path
from types import EllipsisType
from typing import Any, Protocol

import numpy as np
import torch

from engine.native.formats.coded import ALL, CodedMatrix
from engine.native.formats.experts import matrices_of_experts
from engine.native.formats.finite import check_finite
from engine.native.formats.gguf.file import GgufTensor
from engine.native.formats.grouped import GroupedWeights
from engine.native.formats.stored import (
    EMBEDDING,
    HEAD,
    WeightFormat,
    files_of,
    is_matrix,
    quantized,
)
from engine.native.formats.tensors import StoredTensor

__all__ = ["EMBEDDING", "HEAD", "FileWeights", "LlamaWeights", "ModuleWeights"]


class LlamaWeights(Protocol):
    """Tensors by the names that transformers gives them; matrices of experts by those of Qwen3-MoE's files."""

    def shape(self, name: str) -> Sequence[int] | None:
        """Return the shape of a tensor, None if the model has none of this name."""

    def tensor(self, name: str, rows: slice = ALL) -> torch.Tensor | None:
        """Return rows of a tensor, None if the model has none of this name."""

    def grouped(self, name: str, rows: slice = ALL) -> GroupedWeights | None:
        """Return rows of a quantized matrix, None for other tensors."""

    def tied(self) -> bool:
        """Return whether the head is the embedding."""


class ModuleWeights:
    """The weights of a loaded model."""

    def __init__(self, model: Any) -> None:
        self._tensors: dict[str, torch.Tensor] = model.state_dict()
        self._matrices = matrices_of_experts({name: _Loaded(one) for name, one in self._tensors.items()})

    def shape(self, name: str) -> Sequence[int] | None:
        """Return the shape of a tensor, None if the model has none of this name."""
        found = self._matrices.get(name)
        return None if found is None else found.get_shape()

    def tensor(self, name: str, rows: slice = ALL) -> torch.Tensor | None:
        """Return rows of a tensor, None if the model has none of this name."""
        found = self._matrices.get(name)
        return None if found is None else found[... if rows == ALL else rows]

    def grouped(self, _name: str, _rows: slice = ALL) -> GroupedWeights | None:
        """Return None: modules have no quantized matrices."""
        return None

    def tied(self) -> bool:
        """Return whether the head is the embedding."""
        embedding, head = self._tensors.get(EMBEDDING), self._tensors.get(HEAD)
        return embedding is not None and head is not None and embedding.data_ptr() == head.data_ptr()


class FileWeights:
    """The weights in the files of a folder, read one at a time. A tied head is the embedding.

    `tensor` dequantizes to bfloat16.
    """

    def __init__(self, folder: Path | None, weights: WeightFormat = "auto") -> None:
        """Open the files of a folder; without one there are no weights. Raises ModelUnsupported if one is damaged."""
        files = files_of(folder, torch.bfloat16) if folder else {}
        tensors: dict[str, StoredTensor] = {name: file.get_slice(name) for name, file in files.items()}
        self._tensors = quantized(matrices_of_experts(tensors), weights, torch.bfloat16)
        self._dense = weights == "bf16"
        self._dequantized: dict[str, None] = {}

    @property
    def dequantized(self) -> list[str]:
        """Names of quantized matrices that were read as dense ones, although the files' format is to be kept."""
        return list(self._dequantized)

    def shape(self, name: str) -> Sequence[int] | None:
        """Return the shape of a tensor, None if no file has it."""
        stored = self._stored(name)
        return None if stored is None else stored.get_shape()

    def tensor(self, name: str, rows: slice = ALL) -> torch.Tensor | None:
        """Read rows of a tensor; None if no file has it. Raises ModelUnsupported if they are not finite in bfloat16."""
        stored = self._stored(name)
        if stored is None:
            return None
        found = stored[... if rows == ALL else rows]
        if not self._dense and is_matrix(stored):
            self._dequantized[name] = None
        check_finite([(name, found)], torch.bfloat16)  # decoders round what is float32 in the file
        return found

    def grouped(self, name: str, rows: slice = ALL) -> GroupedWeights | None:
        """Read rows of a quantized matrix; None for other tensors, and if no file has it.

        Raises ModelUnsupported if scales or minimums are not finite.
        """
        stored = self._stored(name)
        if self._dense or not isinstance(stored, GgufTensor | CodedMatrix):
            return None
        found = stored.grouped(rows)
        if found:
            with np.errstate(over="ignore"):  # of tables with powers of two
                largest = found.scales if found.table is None else found.scales * np.float32(found.table.max())
            check_finite((name, torch.from_numpy(one)) for one in (largest, found.minimums) if one is not None)
        return found

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._tensors)

    def tied(self) -> bool:
        """Return whether the head is the embedding."""
        return HEAD not in self._tensors

    def _stored(self, name: str) -> StoredTensor | None:
        return self._tensors.get(name) or (self._tensors.get(EMBEDDING) if name == HEAD else None)


class _Loaded:
    """A tensor in memory as a StoredTensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, part: EllipsisType | slice | tuple[slice, slice]) -> torch.Tensor:
        return self._tensor[part]
