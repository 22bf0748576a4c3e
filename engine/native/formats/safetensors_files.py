"""The safetensors files of a model's folder: one, or several that an index names."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from engine.errors import ModelUnsupported
from engine.native.formats.image_text import text_tensors

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_LONGEST_NAME = 255  # bytes, of a file in Linux


def are_named(folder: Path) -> bool:
    """Return whether a folder has safetensors files under the names that transformers reads."""
    return (folder / ONE_FILE).is_file() or (folder / INDEX).is_file()


def are_complete(folder: Path) -> bool:
    """Return whether a folder has its safetensors files, all of an index. Raises ModelUnsupported for a wrong index."""
    if (folder / ONE_FILE).is_file() or not (folder / INDEX).is_file():
        return any(folder.glob("*.safetensors"))
    return all((folder / name).is_file() for name in set(_read_index(folder / INDEX).values()))


def named_files(folder: Path) -> dict[str, Any]:
    """Open the files under the names that transformers reads, and return the file of each tensor.

    Of image-text checkpoints they are the tensors of the text part, named as in a text model.

    Raises ModelUnsupported if a file is missing or damaged, is not in the folder, or lacks a tensor of the index.
    """
    index = folder / INDEX
    files = _of_index(folder) if index.is_file() and not (folder / ONE_FILE).is_file() else _of_one(folder)
    return text_tensors(folder, files)


def all_files(folder: Path) -> dict[str, Any]:
    """Open all safetensors files of a folder, and return the file of each tensor. Raises ModelUnsupported likewise."""
    opened = [_open(folder, path.name) for path in sorted(folder.glob("*.safetensors"))]
    files = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 - it is no dictionary
    return text_tensors(folder, files)


def _of_one(folder: Path) -> dict[str, Any]:
    opened = _open(folder, ONE_FILE)
    return dict.fromkeys(opened.keys(), opened)


def placements(folder: Path) -> dict[str, str]:
    """Return the name of each tensor's file, as the index says. Raises ModelUnsupported if one is not in the folder."""
    placed = _read_index(folder / INDEX)
    for tensor, name in placed.items():
        if not name.endswith(".safetensors") or Path(name).name != name or "\0" in name:
            raise ModelUnsupported(
                f"{INDEX} places tensor {tensor} in {name!r}, which is no safetensors file of the model's folder"
            )
        if len(name.encode(errors="replace")) > _LONGEST_NAME or not (folder / name).is_file():
            raise ModelUnsupported(f"its folder lacks {name}, where {INDEX} places tensor {tensor}")
    return placed


def _of_index(folder: Path) -> dict[str, Any]:
    placed = placements(folder)
    files = {name: _open(folder, name) for name in sorted(set(placed.values()))}
    held = {name: set(file.keys()) for name, file in files.items()}
    for tensor, name in placed.items():
        if tensor not in held[name]:
            raise ModelUnsupported(f"{INDEX} places tensor {tensor} in {name}, which lacks it")
    return {tensor: files[name] for tensor, name in placed.items()}


def _open(folder: Path, name: str) -> Any:
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
