"""Models whose weights stay packed: as close to the dequantized weights as rows of 8 bits can be."""

from pathlib import Path

import numpy as np
import pytest
import torch

from engine.attention.llama_shape import LlamaShape
from engine.model.loading import load_model
from engine.native.cpu_backend import CpuBackend
from engine.native.decoder import NativeDecoder
from engine.native.formats import quantize
from engine.native.formats.coded import ALL
from engine.native.formats.grouped import GroupedWeights
from engine.native.grouped_strips import pack_strips, strips_size
from engine.native.kernels import Kernels
from engine.native.llama_weights import EMBEDDING, HEAD, FileWeights
from engine.run.runner import ModelRunner
from tests.engine import native_kernels
from tests.engine.decoding import logits, prompt
from tests.engine.families import FAMILIES, Checkpoint

BLOCK = 16
PLACES = tuple(f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down"))


class MixedWeights:
    """Matrices of 4 and of 8 bits, as files mix them: also in what is multiplied at once. `packed`: not dequantized."""

    def __init__(self, folder: Path, *, packed: bool) -> None:
        self._files = FileWeights(folder)
        self._packed = packed

    def tensor(self, name: str) -> torch.Tensor | None:
        found = self._quantized(name)
        return self._files.tensor(name) if found is None else torch.from_numpy(found.dense())

    def grouped(self, name: str, rows: slice = ALL) -> GroupedWeights | None:
        assert rows == ALL
        return self._quantized(name) if self._packed else None

    def tied(self) -> bool:
        return self._files.tied()

    def _quantized(self, name: str) -> GroupedWeights | None:
        found = self._files.tensor(name)
        if found is None or not (name in (EMBEDDING, HEAD) or any(place in name for place in PLACES)):
            return None
        if found.ndim < 2:  # a bias
            return None
        method = quantize.int8 if name == HEAD or "v_proj" in name or "up_proj" in name else quantize.int4
        return method(name, found.float().numpy())


@pytest.fixture(scope="module", params=["avx512-bf16", "avx2"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return native_kernels.kernels(request.param)


def runner_of(kernels: Kernels, folder: Path, *, packed: bool) -> ModelRunner:
    loaded = load_model(folder, torch.bfloat16, torch.device("cpu"))
    backend = CpuBackend(kernels, loaded.geometry, BLOCK, 100, torch.bfloat16, threads=2)
    shape, weights = LlamaShape.of(loaded.model), MixedWeights(folder, packed=packed)
    decoder = NativeDecoder(kernels, shape, weights, backend.layer_caches, loaded.context_tokens, 2)
    return ModelRunner(loaded, backend, BLOCK, decoder=decoder)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3 with windows"])
def test_logits_are_close_to_those_of_the_dequantized_weights(
    kernels: Kernels, checkpoint: Checkpoint, kind: str
) -> None:
    folder = checkpoint(FAMILIES[kind])
    packed, dense = (runner_of(kernels, folder, packed=one) for one in (True, False))
    parts = [(prompt(count, count), 0, table) for count, table in ((70, (7, 3, 9, 1, 12)), (21, (2, 8)), (1, (5,)))]
    found, expected = (torch.stack(list(logits(one, *parts))) for one in (packed, dense))
    apart = (found - expected).square().mean(dim=1).sqrt() / expected.std(dim=1)
    assert float(apart.mean()) < 0.1  # with weights in wrong places it is about 1


@pytest.mark.parametrize("count", [3, 40])
def test_a_sequence_gets_the_same_logits_alone_and_in_a_batch(
    kernels: Kernels, checkpoint: Checkpoint, count: int
) -> None:
    """Forty prompts are computed in bands, three by all threads together."""
    runner = runner_of(kernels, checkpoint(FAMILIES["llama"]), packed=True)
    parts = [(prompt(30, seed), 0, (2 * seed + 1, 2 * seed + 2)) for seed in range(count)]
    together = logits(runner, *parts)
    for number in (0, count // 2, count - 1):
        assert torch.equal(logits(runner, parts[number])[0], together[number])


def test_rows_that_are_not_finite_give_logits_that_are_not_finite(kernels: Kernels) -> None:
    """Else a broken model would answer as if nothing had happened."""
    weights = quantize.int8("w", np.ones((16, 64), dtype=np.float32))
    memory = kernels.zeros([strips_size(kernels, weights)], torch.uint8)
    strips = pack_strips(kernels, weights, memory, 1)
    for bad in (float("nan"), float("inf")):
        rows = torch.ones(3, 64)
        rows[1, 40] = bad
        found = kernels.multiply_grouped(strips, 16, rows, 1)
        assert not found[1].isfinite().any()
        assert found[0].isfinite().all()
        assert found[2].isfinite().all()
