"""The weights of a Llama-shaped model by name, from transformers' modules or from the model's files."""

from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class LlamaWeights(Protocol):
    """Tensors by the names that transformers gives them."""

    def tensor(self, name: str) -> torch.Tensor | None:
        """Return a tensor, None if the model has none of this name."""


class ModuleWeights:
    """The weights of a loaded model."""

    def __init__(self, model: Any) -> None:
        self._tensors: dict[str, torch.Tensor] = model.state_dict()

    def tensor(self, name: str) -> torch.Tensor | None:
        """Return a tensor, None if the model has none of this name."""
        return self._tensors.get(name)


class FileWeights:
    """The weights in the safetensors files of a folder, read one at a time. A tied head is the embedding."""

    def __init__(self, folder: Path | None) -> None:
        """Open the files of a folder; without one there are no weights."""
        paths = sorted(folder.glob("*.safetensors")) if folder else []
        files: list[Any] = [safe_open(path, framework="pt") for path in paths]
        self._files = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - it is no dictionary

    def tensor(self, name: str) -> torch.Tensor | None:
        """Read a tensor; None if no file has it."""
        file = self._files.get(name)
        if file is None:
            return self.tensor(EMBEDDING) if name == HEAD else None
        found: torch.Tensor = file.get_tensor(name)
        return found
