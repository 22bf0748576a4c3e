"""Models of GGUF files as folders with safetensors files in float32, for transformers and other programs."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.model.loaded import fingerprint
from engine.native.formats.stored import files_of
from services.models.model_store import build_once, default_cache


def dense_folder(folder: Path) -> Path:
    """Return a folder with the same values in float32, made once in the cache.

    Folders without a GGUF file are returned as they are.
    """
    if not any(folder.glob("*.gguf")):
        return folder
    dense = default_cache() / f"{folder.name}-float32-{fingerprint(folder)[:8]}"
    build_once(dense, lambda workshop: _written(folder, workshop / "model"), lambda *_: None)
    return dense


def _written(folder: Path, destination: Path) -> Path:
    shutil.copytree(folder, destination, ignore=shutil.ignore_patterns("*.gguf"))
    tensors = {name: file.get_slice(name)[...] for name, file in files_of(folder, torch.float32).items()}
    save_file(tensors, destination / "model.safetensors", {"format": "pt"})
    return destination
