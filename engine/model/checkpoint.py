"""The files with a model's weights: a safetensors file, several that an index names, or a GGUF file."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import ModelUnsupported
from engine.native.formats.gguf_file import GgufFile, gguf_of, is_llama
from engine.native.formats.stored import StoredTensor, WeightFormat, quantized

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' names of types


class Checkpoint:
    """Tensors by name, in files that are mapped into memory. Nothing is read until a tensor is used."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32, weights: WeightFormat = "auto") -> None:
        """Open the files. What a GGUF file or `weights` quantizes is read as dequantized values of `dtype`.

        Raises ModelUnsupported if a file is missing or damaged, lacks a tensor of the index, or has quantized weights
        that the configuration does not declare.
        """
        gguf = gguf_of(folder)
        files = _in_gguf(gguf, dtype) if gguf else _in_safetensors(folder)
        if not gguf:
            _check_types(files)
        tensors: dict[str, StoredTensor] = {name: file.get_slice(name) for name, file in files.items()}
        self._tensors = quantized(tensors, weights, dtype)

    @staticmethod
    def in_folder(folder: Path) -> bool:
        """Return whether a folder has safetensors files under the names that transformers reads, or a GGUF file.

        Raises ModelUnsupported if it has several GGUF files, or one that cannot be read.
        """
        gguf = gguf_of(folder)
        return is_llama(gguf) if gguf else (folder / ONE_FILE).is_file() or (folder / INDEX).is_file()

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._tensors)

    def stored(self, name: str) -> StoredTensor:
        """Return the handle of a tensor: `get_shape()`, and `[...]`, which maps it or decodes it."""
        return self._tensors[name]


def _in_gguf(path: Path, dtype: torch.dtype) -> dict[str, Any]:
    opened = GgufFile(path, dtype)
    return dict.fromkeys(opened.keys(), opened)


def _in_safetensors(folder: Path) -> dict[str, Any]:
    index = folder / INDEX
    if (folder / ONE_FILE).is_file() or not index.is_file():
        opened = _open(folder, ONE_FILE)
        return dict.fromkeys(opened.keys(), opened)
    found, placed = {}, _read_index(index)
    files = {name: _open(folder, name) for name in sorted(set(placed.values()))}
    held = {name: set(file.keys()) for name, file in files.items()}
    for tensor, name in placed.items():
        if tensor not in held[name]:
            raise ModelUnsupported(f"{INDEX} places tensor {tensor} in {name}, which lacks it")
        found[tensor] = files[name]
    return found


def _check_types(files: dict[str, Any]) -> None:
    """Raise ModelUnsupported if weights are codes: without their scales, they would be taken for values."""
    for name, file in files.items():
        if name.endswith(".weight") and (kind := file.get_slice(name).get_dtype()) not in _FLOATS:
            raise ModelUnsupported(f"its tensor {name} has type {kind}, but config.json declares no quantization")


def _open(folder: Path, name: str) -> Any:
    if Path(name).name != name:
        raise ModelUnsupported(f"{INDEX} names a file outside the model's folder, {name!r}")
    try:
        return safe_open(folder / name, framework="pt")
    except FileNotFoundError as error:
        raise ModelUnsupported(f"its folder lacks {name}") from error
    except (SafetensorError, OSError) as error:
        raise ModelUnsupported(f"{name} cannot be read: {error}") from error


def _read_index(index: Path) -> dict[str, str]:
    try:
        placed = json.loads(index.read_text())["weight_map"]
        if placed and all(isinstance(name, str) for name in placed.values()):
            return dict(placed)
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise ModelUnsupported(f"{INDEX} has no weight_map from tensors to files")
