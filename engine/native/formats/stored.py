"""Tensors as a model's files have them, or quantized on the way."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import EllipsisType
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from engine.native.formats import quantize
from engine.native.formats.coded import ALL, CodedMatrix, ExpertPlace
from engine.native.formats.gguf.file import GgufFile, GgufTensor, gguf_of, quantized_format
from engine.native.formats.grouped import GroupedWeights
from engine.native.formats.quantized.methods import scheme_of
from engine.native.formats.quantized.reading import decoded
from engine.native.formats.safetensors_files import all_files, are_named, named_files
from engine.native.formats.tensors import StoredTensor, TensorFile

WeightFormat: TypeAlias = Literal["auto", "bf16", "int8", "int4"]
"""auto: as the files have them; bf16: dequantized; int8 and int4: quantized while they are loaded."""

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_QUANTIZED: dict[str, quantize.Quantize] = {"int8": quantize.int8, "int4": quantize.int4}
_MATRIX = re.compile(
    r"model\.layers\.\d+\.(self_attn\.[qkvo]|mlp\.(experts\.\d+\.)?(gate|up|down))_proj\.weight|lm_head\.weight"
)
_EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_ALL_EXPERTS = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(gate_up|down)_proj")
_DIMENSIONS = 3  # of a tensor of all experts


class RoundedCodes:
    """A matrix that is quantized as it is read."""

    def __init__(self, name: str, stored: StoredTensor, method: str) -> None:
        """`method` is int8 or int4."""
        self._name, self._stored = name, stored
        self._quantize = _QUANTIZED[method]

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        outputs, inputs = self._stored.get_shape()
        return outputs, inputs

    def grouped(self, begin: int, end: int) -> GroupedWeights:
        """Return quantized outputs. Raises ModelUnsupported, with the name, if they cannot be quantized."""
        return self._quantize(self._name, self._stored[begin:end].float().numpy())

    def values(self, begin: int, end: int) -> npt.NDArray[np.float32]:
        """Return the values of the quantized outputs."""
        return self.grouped(begin, end).dense()


def quantized_matrix(name: str, stored: StoredTensor, method: str, dtype: torch.dtype) -> CodedMatrix:
    """Return a matrix that is quantized as it is read; dense values are of `dtype`. `method` is int8 or int4."""
    place = stored.place if isinstance(stored, ExpertMatrix) else getattr(stored, "own_place", None)
    return CodedMatrix(RoundedCodes(name, stored, method), dtype, place)


class ExpertMatrix:
    """One matrix of one expert, [outputs, inputs], in a tensor of all experts."""

    def __init__(self, stored: StoredTensor, place: ExpertPlace) -> None:
        """`stored` is the tensor of all experts."""
        self._stored = stored
        self.place = place

    def get_shape(self) -> list[int]:
        """Return the shape, outputs first."""
        return [len(self.place.outputs), self._stored.get_shape()[1 if self.place.transposed else 2]]

    def __getitem__(self, part: "EllipsisType | slice | tuple[slice, slice]") -> torch.Tensor:
        rows, columns = part if isinstance(part, tuple) else (ALL if part is ... else part, ALL)
        outputs = self.place.outputs[rows]
        span = slice(outputs.start, outputs[-1] + 1) if outputs else slice(0, 0)
        one = slice(self.place.expert, self.place.expert + 1)
        read: Any = self._stored  # files read three slices too
        found: torch.Tensor = read[one, :, span][0].T if self.place.transposed else read[one, span, :][0]
        return found[:: outputs.step, columns]


class QuantizedExperts:
    """A tensor of all experts that is quantized as it is read. Its values are those of the quantized matrices."""

    def __init__(self, shape: list[int], matrices: "Sequence[tuple[ExpertPlace, CodedMatrix]]") -> None:
        """`matrices` make up the tensor."""
        self._shape = shape
        self._experts: dict[int, list[tuple[ExpertPlace, CodedMatrix]]] = defaultdict(list)
        for place, matrix in matrices:
            self._experts[place.expert].append((place, matrix))

    def get_shape(self) -> list[int]:
        """Return the shape, experts first."""
        return self._shape

    def expert(self, number: int) -> torch.Tensor:
        """Return the part of one expert."""
        found = torch.empty(self._shape[1:], dtype=self._experts[number][0][1].dtype)
        for place, matrix in self._experts[number]:
            place.of(found)[...] = matrix[...]
        return found

    def __getitem__(self, part: "EllipsisType | slice | tuple[slice, slice]") -> torch.Tensor:
        found = torch.empty(self._shape, dtype=self._experts[0][0][1].dtype)
        for number, one in enumerate(found):
            one[...] = self.expert(number)
        return found[part]


def matrices_of_experts(tensors: Mapping[str, StoredTensor]) -> "dict[str, StoredTensor]":
    """Return tensors with those of all experts replaced by their matrices, as files have them: one for each expert."""
    found = dict(tensors)
    for name in filter(is_of_all_experts, tensors):
        experts, _, part = name.rpartition(".")
        downs = f"{experts}.down_proj"
        pair = [tensors[one] for one in (name, downs) if one in tensors]
        if part == "down_proj" or [len(one.get_shape()) for one in pair] != [_DIMENSIONS] * 2:
            continue
        alternating = f"{name}_bias" in tensors  # as in GPT-OSS; others have gates, then ups
        found |= _matrices(experts, found.pop(name), found.pop(downs), alternating=alternating)
    return found


def _matrices(experts: str, gates: StoredTensor, down: StoredTensor, *, alternating: bool) -> dict[str, StoredTensor]:
    """Return the matrices of a layer's experts. Of two sides, only one can be twice as long as that of the other."""
    count, *sides = gates.get_shape()
    transposed = sides[1] == 2 * down.get_shape()[1]
    both, hidden = sides[transposed], sides[not transposed]
    gate, up = (range(0, both, 2), range(1, both, 2)) if alternating else (range(both // 2), range(both // 2, both))
    parts = (("gate", gates, gate), ("up", gates, up), ("down", down, range(hidden)))
    return {
        f"{experts}.{one}.{part}_proj.weight": ExpertMatrix(stored, ExpertPlace(one, outputs, transposed))
        for one in range(count)
        for part, stored, outputs in parts
    }


def joined_experts(tensors: Mapping[str, StoredTensor]) -> "dict[str, StoredTensor]":
    """Return tensors with the quantized matrices of experts joined, as transformers' modules have them."""
    found: dict[str, StoredTensor] = {}
    joined: dict[str, list[tuple[ExpertPlace, CodedMatrix]]] = defaultdict(list)
    for name, stored in tensors.items():
        match = _EXPERT.fullmatch(name)
        if not (match and isinstance(stored, CodedMatrix)):
            found[name] = stored
            continue
        experts, number, part = match.groups()
        place = stored.place(int(number), second=part == "up")
        joined[f"{experts}.{'down' if part == 'down' else 'gate_up'}_proj"].append((place, stored))
    return found | {name: QuantizedExperts(_joined_shape(matrices), matrices) for name, matrices in joined.items()}


def _joined_shape(matrices: "Sequence[tuple[ExpertPlace, CodedMatrix]]") -> list[int]:
    count = 1 + max(place.expert for place, _ in matrices)
    outputs = 1 + max(place.outputs[-1] for place, _ in matrices)
    place, matrix = matrices[0]
    inputs = matrix.get_shape()[1]
    return [count, inputs, outputs] if place.transposed else [count, outputs, inputs]


def is_quantized(name: str, *, tied: bool) -> bool:
    """Return whether int8 and int4 quantize a tensor: the matrices of layers and of experts, and the head.

    A tied head is the embedding. Other embeddings are read a row at a time, so their size costs no time.
    """
    return bool(_MATRIX.fullmatch(name)) or (tied and name == EMBEDDING)


def is_of_all_experts(name: str) -> bool:
    """Return whether a tensor has the gates and ups, or the downs, of all experts of a layer."""
    return bool(_ALL_EXPERTS.fullmatch(name))


def quantized(
    tensors: "dict[str, StoredTensor]", weights: WeightFormat, dtype: torch.dtype
) -> "dict[str, StoredTensor]":
    """Return the tensors of a model, with those quantized that `weights` quantizes."""
    if weights not in _QUANTIZED:
        return tensors
    tied = HEAD not in tensors
    return {
        name: quantized_matrix(name, stored, weights, dtype) if is_quantized(name, tied=tied) else stored
        for name, stored in tensors.items()
    }


def quantized_modules(
    tensors: "dict[str, StoredTensor]", weights: WeightFormat, dtype: torch.dtype
) -> "dict[str, StoredTensor]":
    """Return the same for transformers' modules, which have the matrices of all experts as one tensor."""
    if weights not in _QUANTIZED:
        return tensors
    return joined_experts(quantized(matrices_of_experts(tensors), weights, dtype))


def is_matrix(stored: StoredTensor) -> bool:
    """Return whether a tensor is a matrix, or those of all experts, whose values have to be decoded."""
    return isinstance(stored, CodedMatrix | QuantizedExperts) or (isinstance(stored, GgufTensor) and stored.is_grouped)


def stored_format(source: Path) -> str:
    """Return the format of the quantized weights in a folder, or in a GGUF file, such as Q4_K or gptq int4 g128.

    It is empty if they are dense. Of a GGUF file it is that of most of its quantized weights. Raises ModelUnsupported
    if a file cannot be read.
    """
    gguf = gguf_of(source) if source.is_dir() else source
    if gguf:
        return quantized_format(gguf)
    scheme = scheme_of(source)
    return scheme.label if scheme else ""


def files_of(folder: Path, dtype: torch.dtype) -> "dict[str, TensorFile]":
    """Open a folder's safetensors files, or its GGUF file; return the file of each tensor, none if it has no files.

    They are the files that `engine.model.checkpoint` reads; of safetensors files with other names all are read.
    Quantized tensors are decoded to `dtype`. Raises ModelUnsupported if a file cannot be read, or has quantized weights
    that the folder does not declare.
    """
    gguf = gguf_of(folder)
    if gguf:
        whole = GgufFile(gguf, dtype)
        return dict.fromkeys(whole.keys(), whole)
    return decoded(folder, named_files(folder) if are_named(folder) else all_files(folder), dtype)
