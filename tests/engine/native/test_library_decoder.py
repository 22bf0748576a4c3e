"""Checkpoints of the formats' own libraries run packed: as close to dequantized weights as rows of 8 bits can be."""

import pytest
import torch

from engine.native.kernels import Kernels
from engine.native.llama_weights import FileWeights
from tests.engine import native_kernels
from tests.engine.decoding import logits
from tests.engine.model.test_library_checkpoints import FOLDERS, NAMES
from tests.engine.native.formats.quantized.test_library_folders import IN_FLOATS
from tests.engine.native.test_packed_decoder import apart
from tests.engine.native.test_quantized_decoder import runner_of
from tests.model_types.judgement import random_prompts

# Parts of names of matrices in floats of 8 bits, and of those that are multiplied with one that is not quantized.
DENSE = {"compressed-mixed": ("self_attn",), "bitsandbytes-int8": ("gate_proj", "up_proj")}


@pytest.fixture(scope="module", params=["avx512-bf16", "avx2"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return native_kernels.kernels(request.param)


@pytest.mark.parametrize("name", [name for name in NAMES if "fp8" not in name and name not in IN_FLOATS])
def test_packed_weights_give_the_logits_of_the_dequantized_ones(kernels: Kernels, name: str) -> None:
    packed, dense = FileWeights(FOLDERS / name), FileWeights(FOLDERS / name, "bf16")
    runners = [runner_of(kernels, FOLDERS / name, weights) for weights in (packed, dense)]
    dense_parts = DENSE.get(name, ("-",))
    assert sorted(packed.dequantized) == sorted(one for one in packed.names if any(part in one for part in dense_parts))
    tables = [tuple(range(8 * place + 1, 8 * place + 9)) for place in range(3)]
    parts = [(tuple(prompt), 0, table) for prompt, table in zip(random_prompts(), tables, strict=True)]
    found, expected = (torch.stack(list(logits(runner, *parts))) for runner in runners)
    assert 0 < apart(found, expected) < 0.1  # with weights in wrong places it is about 1


@pytest.mark.parametrize(
    "name", ["fp8-blocks", "fp8-experts", "fp8-stacked-experts", "compressed-fp8-block", *IN_FLOATS]
)
def test_floats_that_no_kernel_has_are_multiplied_as_bfloat16(kernels: Kernels, name: str) -> None:
    weights = FileWeights(FOLDERS / name)
    runner = runner_of(kernels, FOLDERS / name, weights)
    assert len(weights.dequantized) == sum("_proj" in one for one in weights.names)
    assert torch.stack(list(logits(runner, ((1, 2, 3), 0, (1,))))).isfinite().all()
