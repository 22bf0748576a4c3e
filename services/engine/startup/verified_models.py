"""Models whose native decoder has matched transformers' modules at an earlier start.

They are loaded from their files alone. transformers, its modules and the comparison cost seconds of CPU at each start.
"""

import hashlib
import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from engine.attention.cache import CacheGeometry
from engine.attention.llama_shape import ExpertsShape, LlamaShape
from engine.model.loaded import LoadedModel, fingerprint, fingerprint_of
from engine.native import decoder, formats, grouped_strips, llama_weights, matrix_packer
from engine.native.kernels import Kernels

_FORMATS = Path(str(formats.__file__)).parent
_MODULES = (decoder, grouped_strips, llama_weights, matrix_packer)
_SOURCES = (*(Path(str(module.__file__)) for module in _MODULES), *sorted(_FORMATS.rglob("*.py")))

log = logging.getLogger("quire.engine")


@dataclass(frozen=True)
class VerifiedModel:
    """What a model's files do not give without transformers."""

    shape: LlamaShape
    context_tokens: int
    eos_token_ids: tuple[int, ...]

    @classmethod
    def of(cls, loaded: LoadedModel) -> "VerifiedModel":
        """Describe a model that was loaded with its modules."""
        return cls(LlamaShape.of(loaded.model), loaded.context_tokens, tuple(sorted(loaded.eos_token_ids)))

    def loaded(self, folder: Path, weights: str = "") -> LoadedModel:
        """Return the model of a folder without modules, in bfloat16, with weights packed in this format."""
        shape = self.shape
        equal = CacheGeometry.uniform(shape.layers, shape.kv_heads, shape.head_size).layers
        return LoadedModel(
            model=None,
            device=torch.device("cpu"),
            geometry=CacheGeometry(
                tuple(layer._replace(window=one) for layer, one in zip(equal, shape.windows, strict=True))
            ),
            context_tokens=self.context_tokens,
            vocabulary_size=shape.vocabulary,
            eos_token_ids=frozenset(self.eos_token_ids),
            fingerprint=fingerprint_of(folder, torch.bfloat16, weights),
            dtype=torch.bfloat16,
            folder=folder,
            shape=shape,
            weights=weights,
        )


class VerifiedModels:
    """Descriptions of verified models, one file each in the folder of the kernels."""

    def __init__(self, folder: Path, kv_dtype: str = "auto", weights: str = "") -> None:
        """A decoder is verified with one type of KV cache, the setting, and one format of weights (`LoadedModel`)."""
        self._folder = folder
        self._kv_dtype = kv_dtype
        self._weights = weights

    def find(self, model: Path, kernels: Kernels) -> VerifiedModel | None:
        """Return the description of a model folder, None if it was not verified with these kernels."""
        path = self._path(model, kernels)
        try:
            text, _, digest = path.read_text().partition("\n")
            if _digest(text) != digest:  # the decoder relies on the sizes
                raise ValueError("it is damaged")
            read = json.loads(text)
            return VerifiedModel(_shape(read["shape"]), read["context_tokens"], tuple(read["eos_token_ids"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s cannot be read, so the model is loaded with transformers: %s", path, error)
            return None

    def add(self, model: Path, kernels: Kernels, verified: VerifiedModel) -> None:
        """Keep a description; without space or permission only a warning is logged."""
        path = self._path(model, kernels)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(".unfinished")
            text = json.dumps(asdict(verified))
            unfinished.write_text(f"{text}\n{_digest(text)}")
            unfinished.replace(path)
        except OSError as error:
            log.warning("%s cannot be written, so later starts take longer: %s", path, error)

    def _path(self, model: Path, kernels: Kernels) -> Path:
        digest = hashlib.sha256(f"{fingerprint(model)} {kernels.name} {self._kv_dtype} {self._weights}".encode())
        for file in (model / "generation_config.json", *_SOURCES):
            digest.update(file.read_bytes() if file.exists() else b"")
        return self._folder / f"verified-{digest.hexdigest()[:20]}.json"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _shape(read: dict[str, Any]) -> LlamaShape:
    experts = read["experts"] and ExpertsShape(**read["experts"] | {"layers": tuple(read["experts"]["layers"])})
    lists = {name: tuple(read[name]) for name in ("windows", "frequencies")}
    return LlamaShape(**read | lists | {"experts": experts})
