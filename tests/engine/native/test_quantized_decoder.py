"""Checkpoints in GPTQ and AWQ run packed: as close to their dequantized weights as rows of 8 bits can be."""

from pathlib import Path

import pytest
import torch

from engine.attention.llama_shape import LlamaShape
from engine.model.loading import load_model
from engine.native.cpu_backend import CpuBackend
from engine.native.decoder import NativeDecoder
from engine.native.kernels import Kernels
from engine.native.llama_weights import FileWeights
from engine.run.runner import ModelRunner
from tests.engine import native_kernels
from tests.engine.decoding import logits
from tests.engine.native.formats.quantized.write_checkpoints import CASES, COMMITTED, FOLDER, write
from tests.engine.native.test_packed_decoder import apart
from tests.model_types.judgement import random_prompts

BLOCK = 16
# Matrices that were multiplied with one that is not quantized.
DENSE = {"gptq-8-bit": {f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up")}}


@pytest.fixture(scope="module", params=["avx512-bf16", "avx2"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return native_kernels.kernels(request.param)


def runner_of(kernels: Kernels, folder: Path, weights: FileWeights) -> ModelRunner:
    loaded = load_model(folder, torch.bfloat16, torch.device("cpu"))
    backend = CpuBackend(kernels, loaded.geometry, BLOCK, 40, torch.bfloat16, threads=2)
    shape = LlamaShape.of(loaded.model)
    decoder = NativeDecoder(kernels, shape, weights, backend.layer_caches, loaded.context_tokens, 2)
    return ModelRunner(loaded, backend, BLOCK, decoder=decoder)


@pytest.mark.parametrize("name", CASES)
def test_packed_weights_give_the_logits_of_the_dequantized_ones(kernels: Kernels, tmp_path: Path, name: str) -> None:
    folder = FOLDER / name if name in COMMITTED else write(name, tmp_path / name)
    packed, dense = FileWeights(folder), FileWeights(folder, "bf16")
    runners = [runner_of(kernels, folder, weights) for weights in (packed, dense)]
    assert set(packed.dequantized) == DENSE.get(name, set())
    tables = [tuple(range(8 * place + 1, 8 * place + 9)) for place in range(3)]
    parts = [(tuple(prompt), 0, table) for prompt, table in zip(random_prompts(), tables, strict=True)]
    found, expected = (torch.stack(list(logits(runner, *parts))) for runner in runners)
    assert apart(found, expected) < 0.1  # with weights in wrong places it is about 1
