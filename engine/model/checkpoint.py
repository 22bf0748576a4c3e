"""The safetensors files of a model's folder: one file, or several that an index names."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from engine.errors import ModelUnsupported

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Checkpoint:
    """Tensors by name, in files that are mapped into memory. Nothing is read until a tensor is used."""

    def __init__(self, folder: Path) -> None:
        """Open the files. Raises ModelUnsupported if one is missing or damaged, or lacks a tensor of the index."""
        self._files: dict[str, Any] = {}
        index = folder / INDEX
        if (folder / ONE_FILE).is_file() or not index.is_file():
            opened = _open(folder, ONE_FILE)
            self._files = dict.fromkeys(opened.keys(), opened)
            return
        placed = _read_index(index)
        files = {name: _open(folder, name) for name in sorted(set(placed.values()))}
        held = {name: set(file.keys()) for name, file in files.items()}
        for tensor, name in placed.items():
            if tensor not in held[name]:
                raise ModelUnsupported(f"{INDEX} places tensor {tensor} in {name}, which lacks it")
            self._files[tensor] = files[name]

    @staticmethod
    def in_folder(folder: Path) -> bool:
        """Return whether a folder has such files under the names that transformers reads."""
        return (folder / ONE_FILE).is_file() or (folder / INDEX).is_file()

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._files)

    def stored(self, name: str) -> Any:
        """Return safetensors' handle of a tensor: `get_shape()`, and `[...]`, which maps it."""
        return self._files[name].get_slice(name)


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
