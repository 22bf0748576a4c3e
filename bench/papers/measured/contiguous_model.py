"""The demo model as transformers runs it: torch's attention on contiguous K and V, which grow with each token."""

import os

# As in the engine's process, and before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

from bench.report.terms import Terms
from services.models.model_store import default_cache, resolve
from tests.dense_model import dense_folder


class ContiguousSequence:
    """A sequence with transformers' default cache: one tensor of K and one of V for each layer."""

    def __init__(self, model: "ContiguousModel", tokens: Sequence[int]) -> None:
        """Compute the tokens in one step."""
        self._model = model
        self._cache = DynamicCache()
        self._first = model.next_token(torch.tensor([list(tokens)]), self._cache)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V."""
        return sum(part.nbytes for layer in self._cache.layers for part in (layer.keys, layer.values))

    def decode(self, count: int) -> list[float]:
        """Decode tokens greedily; return the seconds of each."""
        seconds, token = [], self._first
        for _ in range(count):
            begun = perf_counter()
            token = self._model.next_token(token.view(1, 1), self._cache)
            seconds.append(perf_counter() - begun)
        return seconds

    def forget(self, count: int) -> None:
        """Remove the last tokens."""
        self._cache.crop(-count)


class ContiguousModel:
    """The demo model by transformers."""

    def __init__(self, dtype: str, folder: Path | None = None) -> None:
        """Load it, or the model of a folder, with weights and cache of this type."""
        logging.disable_progress_bar()
        folder = folder or dense_folder(resolve("demo", default_cache(), lambda *_: None))
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="sdpa", local_files_only=True
        ).eval()

    def terms(self, work: str) -> Terms:
        """Return what it computes with."""
        (dtype,) = {str(weight.dtype).removeprefix("torch.") for weight in self._model.parameters()}
        threads = torch.get_num_threads()
        return Terms(weights=dtype, activations=dtype, kv_cache=dtype, threads=threads, work=work)

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(weight.nbytes for weight in self._model.parameters())

    @torch.inference_mode()
    def next_token(self, token_ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
        """Compute `[1, tokens]` tokens onto the cache; return the likeliest next one."""
        output = self._model(input_ids=token_ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        likeliest: torch.Tensor = output.logits[0, -1].argmax()
        return likeliest
