"""Mixtures of experts in 8 and 4 bits: in the decoder, in the modules that check it, and in the plan."""

from pathlib import Path

import pytest
import torch

import engine.model.weights
from engine.attention.llama_shape import LlamaShape
from engine.model.decoded_weights import decode
from engine.model.loaded import LoadedModel
from engine.model.loading import load_model
from engine.model.model_shape import read_shape
from engine.native import matrix_packer
from engine.native.cpu_backend import CpuBackend
from engine.native.decoder import NativeDecoder
from engine.native.formats.stored import WeightFormat
from engine.native.kernels import Kernels
from engine.native.llama_weights import FileWeights, LlamaWeights, ModuleWeights
from engine.run.runner import ModelRunner
from services.engine.settings import EngineSettings
from services.engine.startup.assembly import assemble
from tests.engine import native_kernels
from tests.engine.decoding import logits, prompt
from tests.engine.expert_models import EXPERT_MODELS, ExpertModel, difference, write_expert_model

CPU = torch.device("cpu")
BLOCK = 16
# The inputs of quantized matrices are whole groups.
SIZES = {"gpt_oss": {"intermediate_size": 64}, "qwen3_moe": {"moe_intermediate_size": 64}}


@pytest.fixture(scope="module", params=["avx512-bf16", "avx2"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return native_kernels.kernels(request.param)


@pytest.fixture(scope="module", params=EXPERT_MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = EXPERT_MODELS[request.param]
    return write_expert_model(
        ExpertModel(model.name, model.config | SIZES[model.name]), tmp_path_factory.mktemp("experts") / "model"
    )


def runner_of(kernels: Kernels, folder: Path, weights: WeightFormat, *, packed: bool) -> ModelRunner:
    loaded = load_model(folder, torch.bfloat16, CPU, weights)
    backend = CpuBackend(kernels, loaded.geometry, BLOCK, 100, torch.bfloat16, threads=2)
    given: LlamaWeights = FileWeights(folder, weights) if packed else ModuleWeights(loaded.model)
    decoder = NativeDecoder(kernels, LlamaShape.of(loaded.model), given, backend.layer_caches, loaded.context_tokens, 2)
    return ModelRunner(loaded, backend, BLOCK, decoder=decoder)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_logits_are_close_to_those_of_the_dequantized_weights(
    kernels: Kernels, folder: Path, weights: WeightFormat
) -> None:
    """The modules have dequantized weights."""
    packed, dense = (runner_of(kernels, folder, weights, packed=one) for one in (True, False))
    parts = [(prompt(5 * number, number), 0, (2 * number, 2 * number + 1)) for number in range(1, 7)]
    found, expected = (logits(one, *parts) for one in (packed, dense))
    assert difference(found, expected) < 0.1  # with weights in wrong places it is about 1


@pytest.mark.parametrize("count", [3, 40])
def test_a_sequence_gets_the_same_logits_alone_and_in_a_batch(kernels: Kernels, folder: Path, count: int) -> None:
    runner = runner_of(kernels, folder, "int4", packed=True)
    parts = [(prompt(30, seed), 0, (2 * seed + 1, 2 * seed + 2)) for seed in range(count)]
    together = logits(runner, *parts)
    for number in (0, count // 2, count - 1):
        assert torch.equal(logits(runner, parts[number])[0], together[number])


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_experts_that_are_packed_in_pieces_give_the_same_logits(
    kernels: Kernels, folder: Path, weights: WeightFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [(prompt(5 * number, number), 0, (2 * number, 2 * number + 1)) for number in range(1, 7)]
    whole = logits(runner_of(kernels, folder, weights, packed=True), *parts)
    monkeypatch.setattr(matrix_packer, "_PIECE", 1024)
    assert torch.equal(logits(runner_of(kernels, folder, weights, packed=True), *parts), whole)


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_files_and_modules_have_the_same_experts(folder: Path, weights: WeightFormat) -> None:
    files = FileWeights(folder, weights)
    modules = ModuleWeights(load_model(folder, torch.bfloat16, CPU, weights).model)
    for layer in (0, 2):
        for part in ("gate", "up", "down"):
            name = f"model.layers.{layer}.mlp.experts.5.{part}_proj.weight"
            ours, theirs = files.tensor(name), modules.tensor(name)
            assert ours is not None
            assert theirs is not None
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_the_plan_counts_the_bytes_of_packed_experts(folder: Path, weights: WeightFormat) -> None:
    planned = read_shape(folder, torch.bfloat16, weights).packed.packed
    files = FileWeights(folder, weights)
    assert planned == sum(packed_bytes(files, name) for name in files.names)


def packed_bytes(files: FileWeights, name: str) -> int:
    grouped, dense = files.grouped(name), files.tensor(name)
    assert dense is not None
    if grouped is None:
        return dense.numel() * 2
    outputs, inputs = grouped.shape
    return outputs * inputs + 4 * outputs if grouped.bits == 8 else outputs * inputs * 5 // 8


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_modules_that_decode_the_chosen_experts_compute_what_loaded_ones_do(
    kernels: Kernels, folder: Path, weights: WeightFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(folder, torch.bfloat16, CPU, weights)
    monkeypatch.setattr(engine.model.weights, "LOADED_BYTES", 0)
    decoded = load_model(folder, torch.bfloat16, CPU, weights, packed=True)
    experts = decoded.model.model.layers[0].mlp.experts
    assert experts.gate_up_proj.untyped_storage().nbytes() == 2
    assert difference(modules_logits(kernels, decoded), modules_logits(kernels, loaded)) < 0.05
    decode(decoded.model)
    assert torch.equal(modules_logits(kernels, decoded), modules_logits(kernels, loaded))


def modules_logits(kernels: Kernels, loaded: LoadedModel) -> torch.Tensor:
    backend = CpuBackend(kernels, loaded.geometry, BLOCK, 20, torch.bfloat16, threads=1)
    parts = [(prompt(5 * number, number), 0, (2 * number, 2 * number + 1)) for number in range(1, 7)]
    return logits(ModelRunner(loaded, backend, BLOCK), *parts)


@pytest.mark.parametrize("weights", ["bf16", "int4"])
def test_the_second_start_uses_the_files_alone_and_computes_the_same(
    folder: Path, weights: str, tmp_path: Path
) -> None:
    """The first one has compared the decoder with the modules, whose experts have the same quantized weights."""
    compiled = native_kernels.FOLDER / f"{native_kernels.kernels().name}.so"
    (tmp_path / compiled.name).symlink_to(compiled)
    settings = EngineSettings(
        model=str(folder),
        dtype="bfloat16",
        weights=weights,
        device_blocks=8,
        kinds="off",  # work without tables of window kinds
        kernels_folder=str(tmp_path),
    )
    first, second = assemble(settings), assemble(settings)
    assert first.loaded.model is not None
    assert second.loaded.model is None
    assert second.loaded.shape == LlamaShape.of(first.loaded.model)
    found, again = (logits(parts.runner._runner, (prompt(20, 1), 0, (1, 2))) for parts in (first, second))  # type: ignore[attr-defined]
    assert torch.equal(found, again)
