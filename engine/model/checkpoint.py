"""The files with a model's weights: a safetensors file, several that an index names, or a GGUF file."""

from pathlib import Path

import torch

from engine.native.formats.gguf.file import gguf_of, is_llama
from engine.native.formats.quantized.methods import file_with_own_name
from engine.native.formats.safetensors_files import are_named
from engine.native.formats.stored import WeightFormat, files_of, is_matrix, quantized_modules
from engine.native.formats.tensors import StoredTensor


class Checkpoint:
    """Tensors by name, in files that are mapped into memory. Nothing is read until a tensor is used."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32, weights: WeightFormat = "auto") -> None:
        """Open the files. What they or `weights` quantize is read as dequantized values of `dtype`.

        Raises ModelUnsupported if a file is missing or damaged, lacks a tensor of the index, or has quantized weights
        that the configuration does not declare.
        """
        files = files_of(folder, dtype)
        tensors: dict[str, StoredTensor] = {name: file.get_slice(name) for name, file in files.items()}
        self._tensors = quantized_modules(tensors, weights, dtype)

    @staticmethod
    def in_folder(folder: Path) -> bool:
        """Return whether a folder has safetensors files under the names that transformers reads, or a GGUF file.

        One file of quantized weights may have a name of its own.

        Raises ModelUnsupported if it has several GGUF files, or one that cannot be read.
        """
        gguf = gguf_of(folder)
        return is_llama(gguf) if gguf else are_named(folder) or file_with_own_name(folder) is not None

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._tensors)

    def adds_nothing(self, name: str) -> bool:
        """Return whether a tensor is a bias of zeros beside a quantized matrix: AutoGPTQ wrote it for all models."""
        module, _, suffix = name.rpartition(".")
        matrix = self._tensors.get(f"{module}.weight") if suffix == "bias" else None
        return matrix is not None and is_matrix(matrix) and not self._tensors[name][...].any()

    def stored(self, name: str) -> StoredTensor:
        """Return the handle of a tensor: `get_shape()`, and `[...]`, which maps it or decodes it."""
        return self._tensors[name]
