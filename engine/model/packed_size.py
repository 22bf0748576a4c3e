"""Memory of a model's weights in the CPU's decoder, by their format."""

import re
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.errors import ModelUnsupported
from engine.model.decoded_weights import LOADED_BYTES
from engine.native.decoder import runs
from engine.native.formats.coded import CodedMatrix
from engine.native.formats.experts import is_of_all_experts
from engine.native.formats.gguf.file import GgufTensor, gguf_of, quantized_format
from engine.native.formats.gguf.header import TensorPlace, read_header
from engine.native.formats.stored import (
    HEAD,
    WeightFormat,
    files_of,
    is_quantized,
    stored_format,
)
from engine.native.grouped_strips import NoKernel, packed_bytes

# Bytes of a weight: int4 has a scale and a minimum of 2 bytes each for 32 of them.
_WEIGHT_BYTES = {"int8": 1.0, "int4": 0.625}
_OUTPUT_SCALE_BYTES = {"int8": 4, "int4": 0}
_OTHER_BYTES = 2
_MATRIX_DIMENSIONS = 2
_NUMBER = re.compile(r"\d+")


class PackedSize(NamedTuple):
    """Bytes of the packed weights, and of the dense copy that a first start loads too.

    `format` names the quantized weights (`LoadedModel.weights`); it is empty without any.
    """

    packed: int
    loaded: int
    format: str = ""


def packed_size(model: Any, weights: WeightFormat, source: Path | None) -> PackedSize:
    """Return the sizes for a model in bfloat16 on the meta device. `source` is the folder or GGUF file of its weights.

    Nothing is packed of a model that the CPU's kernels do not run. Raises ModelUnsupported if `weights` is int8 or int4
    and they do not run it.
    """
    dense = sum(one.nbytes for one in model.parameters())
    if not runs(model):
        if weights in _WEIGHT_BYTES:
            raise ModelUnsupported(f"{weights} is not for this model: the CPU's kernels do not run it as a whole")
        return PackedSize(0, dense)
    if weights in _WEIGHT_BYTES:
        return _quantized(model, weights, dense)
    if source is None or weights != "auto":
        return PackedSize(dense, dense)
    gguf = gguf_of(source) if source.is_dir() else source
    if gguf is None:
        return _of_folder(source, dense)
    stored = quantized_format(gguf)
    return _of_file(gguf, stored, dense) if stored else PackedSize(dense, dense)


def packed_matrices(folder: Path) -> dict[str, tuple[int, int]]:
    """Return weights, and bytes in packed form, of the quantized matrices that kernels multiply as they are, by name.

    One row is read of each kind of matrix: those whose names differ in numbers only, with the same shape. Raises
    ModelUnsupported as `files_of`.
    """
    stored = {name: file.get_slice(name) for name, file in files_of(folder, torch.bfloat16).items()}
    found: dict[str, tuple[int, int]] = {}
    known: dict[tuple[str, ...], int] = {}
    for name, one in stored.items():
        if isinstance(one, CodedMatrix | GgufTensor) and len(shape := one.get_shape()) == _MATRIX_DIMENSIONS:
            kind = (_NUMBER.sub("*", name), *map(str, shape))
            size = known[kind] if kind in known else known.setdefault(kind, _packed_bytes(one))
            found |= {name: (prod(shape), size)} if size else {}
    return found


def _packed_bytes(matrix: CodedMatrix | GgufTensor) -> int:
    """Return the bytes of a matrix in packed form, as its first row says; 0 if it has none."""
    row = matrix.grouped(slice(0, 1))
    try:
        return packed_bytes(row, matrix.get_shape()[0]) if row else 0
    except NoKernel:
        return 0


def _of_folder(folder: Path, dense: int) -> PackedSize:
    matrices = packed_matrices(folder).values() if (stored := stored_format(folder)) else ()
    if not matrices:
        return PackedSize(dense, dense)
    replaced = sum(count for count, _ in matrices) * _OTHER_BYTES
    return _beside(sum(size for _, size in matrices), replaced, dense, stored)


def _quantized(model: Any, weights: WeightFormat, dense: int) -> PackedSize:
    matrices = list(_matrices(model))
    packed = sum(
        one.numel() * _WEIGHT_BYTES[weights] + outputs * _OUTPUT_SCALE_BYTES[weights] for one, outputs in matrices
    )
    return _beside(int(packed), sum(one.nbytes for one, _ in matrices), dense, weights)


def _matrices(model: Any) -> Iterator[tuple[Any, int]]:
    """Yield the weights that are quantized, with the number of their outputs: of experts, those of all."""
    named = dict(model.named_parameters())
    for name, one in named.items():
        if is_quantized(name, tied=HEAD not in named):
            yield one, len(one)
        elif is_of_all_experts(name):
            hidden = model.config.hidden_size
            yield one, len(one) * hidden if name.endswith("down_proj") else one.numel() // hidden


def _of_file(gguf: Path, stored: str, dense: int) -> PackedSize:
    matrices = [one for one in read_header(gguf).tensors.values() if one.format.decode]
    replaced = sum(prod(one.shape) for one in matrices) * _OTHER_BYTES
    return _beside(sum(map(_packed_place, matrices)), replaced, dense, stored)


def _packed_place(place: TensorPlace) -> int:
    """Return the bytes of a matrix in packed form, whose groups may take more bits than in the file."""
    row = np.zeros((1, place.size // place.shape[0]), np.uint8)
    return packed_bytes(place.format.grouped(row), place.shape[0])


def _beside(packed: int, replaced: int, dense: int, stored: str) -> PackedSize:
    """Return the sizes for matrices that take `packed` bytes instead of `replaced`."""
    others = dense - replaced
    if others < 0:
        raise ModelUnsupported("its files have more weights than its configuration says")
    return PackedSize(packed + others, dense if replaced <= LOADED_BYTES else others, stored)
