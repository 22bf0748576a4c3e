"""Tensors as a model's files have them, or quantized on the way."""

import re
from math import prod
from pathlib import Path
from types import EllipsisType
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
import torch

from engine.native.formats import quantize
from engine.native.formats.gguf_file import ALL, GgufFile, gguf_of
from engine.native.formats.grouped import GroupedWeights
from engine.native.formats.safetensors_files import all_files, are_named, named_files

WeightFormat: TypeAlias = Literal["auto", "bf16", "int8", "int4"]
"""auto: as the files have them; bf16: dequantized; int8 and int4: quantized while they are loaded."""

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_QUANTIZED: dict[str, quantize.Quantize] = {"int8": quantize.int8, "int4": quantize.int4}
_MATRIX = re.compile(r"model\.layers\.\d+\.(self_attn\.[qkvo]|mlp\.(gate|up|down))_proj\.weight|lm_head\.weight")
# Weights that are quantized at once.
_PIECE = 1 << 20


class StoredTensor(Protocol):
    """A tensor that is not read yet, as of safetensors' `get_slice`."""

    def get_shape(self) -> list[int]:
        """Return the shape, outputs first."""

    def __getitem__(self, part: "EllipsisType | slice | tuple[slice, slice]") -> torch.Tensor:
        """Read all of it, some rows, or some rows and columns."""


class TensorFile(Protocol):
    """An open file of tensors, as of safetensors' `safe_open`."""

    def keys(self) -> list[str]:
        """Return the names of all tensors."""

    def get_slice(self, name: str) -> Any:
        """Return a tensor's handle, a StoredTensor."""


class QuantizedTensor:
    """A matrix that is quantized as it is read, in pieces of rows. Its values are those of the quantized weights."""

    def __init__(self, name: str, stored: StoredTensor, method: str, dtype: torch.dtype) -> None:
        """`method` is int8 or int4; dense values are of `dtype`."""
        self._name, self._stored, self._dtype = name, stored, dtype
        self._quantize = _QUANTIZED[method]

    def get_shape(self) -> list[int]:
        """Return the shape, outputs first."""
        return self._stored.get_shape()

    def __getitem__(self, part: "EllipsisType | slice | tuple[slice, slice]") -> torch.Tensor:
        rows, columns = part if isinstance(part, tuple) else (ALL if part is ... else part, ALL)
        begin, end, _ = rows.indices(self.get_shape()[0])
        found = torch.empty((max(0, end - begin), self.get_shape()[1]), dtype=self._dtype)
        for piece in self._pieces(begin, end):
            values = torch.from_numpy(self._of_rows(piece).dense())
            found[piece.start - begin : piece.stop - begin] = values
        return found[:, columns] if columns != ALL else found

    def grouped(self, rows: slice = ALL) -> GroupedWeights:
        """Return quantized rows. Raises ModelUnsupported, with the name, if they cannot be quantized."""
        begin, end, _ = rows.indices(self.get_shape()[0])
        parts = [self._of_rows(piece) for piece in self._pieces(begin, end)]
        first = parts[0]
        minimums = None if first.minimums is None else np.concatenate([_minimums(one) for one in parts])
        codes, scales = (np.concatenate([one[field] for one in parts]) for field in (0, 1))
        return GroupedWeights(codes, scales, minimums, first.zero, first.bits, first.group)

    def _pieces(self, begin: int, end: int) -> list[slice]:
        step = max(1, _PIECE // prod(self.get_shape()[1:]))
        return [slice(start, min(start + step, end)) for start in range(begin, end, step)]

    def _of_rows(self, rows: slice) -> GroupedWeights:
        return self._quantize(self._name, self._stored[rows].float().numpy())


def _minimums(weights: GroupedWeights) -> Any:
    return weights.minimums


def is_quantized(name: str, *, tied: bool) -> bool:
    """Return whether int8 and int4 quantize a tensor: the matrices of layers, and the head.

    A tied head is the embedding. Other embeddings are read a row at a time, so their size costs no time.
    """
    return bool(_MATRIX.fullmatch(name)) or (tied and name == EMBEDDING)


def quantized(
    tensors: "dict[str, StoredTensor]", weights: WeightFormat, dtype: torch.dtype
) -> "dict[str, StoredTensor]":
    """Return the tensors of a model, with those quantized that `weights` quantizes."""
    if weights not in _QUANTIZED:
        return tensors
    tied = HEAD not in tensors
    return {
        name: QuantizedTensor(name, stored, weights, dtype) if is_quantized(name, tied=tied) else stored
        for name, stored in tensors.items()
    }


def files_of(folder: Path, dtype: torch.dtype) -> "dict[str, TensorFile]":
    """Open a folder's safetensors files, or its GGUF file; return the file of each tensor, none if it has no files.

    They are the files that `engine.model.checkpoint` reads; of safetensors files with other names all are read.
    Quantized tensors of a GGUF file are decoded to `dtype`. Raises ModelUnsupported if a file cannot be read.
    """
    gguf = gguf_of(folder)
    if gguf:
        whole = GgufFile(gguf, dtype)
        return dict.fromkeys(whole.keys(), whole)
    return named_files(folder) if are_named(folder) else all_files(folder)
