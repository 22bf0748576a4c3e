"""Tensors as a model's files have them, or quantized on the way."""

import re
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from engine.native.formats import quantize
from engine.native.formats.coded import CodedMatrix
from engine.native.formats.experts import ExpertMatrix, JoinedExperts, joined_experts, matrices_of_experts
from engine.native.formats.gguf.file import GgufFile, GgufTensor, gguf_of, quantized_format
from engine.native.formats.grouped import GroupedWeights
from engine.native.formats.quantized.methods import scheme_of
from engine.native.formats.quantized.reading import decoded
from engine.native.formats.safetensors_files import all_files, are_complete, are_named, named_files
from engine.native.formats.tensors import StoredTensor, TensorFile

WeightFormat: TypeAlias = Literal["auto", "bf16", "int8", "int4"]
"""auto: as the files have them; bf16: dequantized; int8 and int4: quantized while they are loaded."""

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_QUANTIZED: dict[str, quantize.Quantize] = {"int8": quantize.int8, "int4": quantize.int4}
_MATRIX = re.compile(
    r"model\.layers\.\d+\.(self_attn\.[qkvo]|mlp\.(experts\.\d+\.)?(gate|up|down))_proj\.weight|lm_head\.weight"
)


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
    place = stored.place if isinstance(stored, ExpertMatrix | CodedMatrix) else None
    return CodedMatrix(RoundedCodes(name, stored, method), dtype, place)


def is_quantized(name: str, *, tied: bool) -> bool:
    """Return whether int8 and int4 quantize a tensor: the matrices of layers and of experts, and the head.

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
        name: quantized_matrix(name, stored, weights, dtype) if is_quantized(name, tied=tied) else stored
        for name, stored in tensors.items()
    }


def quantized_modules(
    tensors: "dict[str, StoredTensor]", weights: WeightFormat, dtype: torch.dtype
) -> "dict[str, StoredTensor]":
    """Return the same for transformers' modules, which have the matrices of all experts as one tensor.

    Raises ModelUnsupported as `joined_experts`.
    """
    given = quantized(matrices_of_experts(tensors), weights, dtype) if weights in _QUANTIZED else tensors
    return joined_experts(given, dtype)


def is_matrix(stored: StoredTensor) -> bool:
    """Return whether a tensor is a matrix, or those of all experts, whose values have to be decoded."""
    return isinstance(stored, CodedMatrix | JoinedExperts) or (isinstance(stored, GgufTensor) and stored.is_grouped)


def stored_format(source: Path) -> str:
    """Return the format of the quantized weights in a folder, or in a GGUF file, such as Q4_K or gptq int4 g128.

    It is empty if they are dense. Of a GGUF file it is that of most of its quantized weights. Raises ModelUnsupported
    if a file cannot be read.
    """
    gguf = gguf_of(source) if source.is_dir() else source
    if gguf:
        return quantized_format(gguf)
    scheme = scheme_of(source)
    if scheme is None:
        if are_complete(source):  # else it is a configuration alone
            files_of(source, torch.bfloat16)  # refuses codes that no file declares
        return ""
    files = files_of(source, torch.bfloat16)
    return scheme.label if any(isinstance(file.get_slice(name), CodedMatrix) for name, file in files.items()) else ""


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
