"""The files with a model's weights: a safetensors file, several that an index names, or a GGUF file."""

from pathlib import Path

import torch

from engine.native.formats.gguf.file import gguf_of, is_llama
from engine.native.formats.safetensors_files import are_named
from engine.native.formats.stored import WeightFormat, files_of, quantized_modules
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

        Raises ModelUnsupported if it has several GGUF files, or one that cannot be read.
        """
        gguf = gguf_of(folder)
        return is_llama(gguf) if gguf else are_named(folder)

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._tensors)

    def stored(self, name: str) -> StoredTensor:
        """Return the handle of a tensor: `get_shape()`, and `[...]`, which maps it or decodes it."""
        return self._tensors[name]
