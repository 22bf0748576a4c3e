"""Checkpoints in GPTQ and AWQ are the dense models that they code. See `write_checkpoints` for what they have."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.attention.torch_backend import TorchBackend
from engine.errors import ModelUnsupported
from engine.model.checkpoint import Checkpoint
from engine.model.loading import load_model
from engine.native.formats.experts import matrices_of_experts
from engine.run.runner import ModelRunner
from services.models.files.bounded_json import InvalidModelFile
from services.models.files.folder_check import check_folder
from tests.engine.decoding import logits
from tests.engine.native.formats.quantized.write_checkpoints import CASES, COMMITTED, FOLDER, write, write_dense
from tests.model_types.judgement import Judgement, random_prompts, served
from tests.reference import greedy_reference, reference_model

CPU = torch.device("cpu")
MOST_BYTES = 200_000

Folders = Callable[[str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Return a case's folder, and that of its values as an ordinary checkpoint."""
    made: dict[str, tuple[Path, Path]] = {}

    def find(name: str) -> tuple[Path, Path]:
        if name not in made:
            place = tmp_path_factory.mktemp(name)
            folder = FOLDER / name if name in COMMITTED else write(name, place / "quantized")
            made[name] = folder, write_dense(name, place / "dense")
        return made[name]

    return find


def last_logits(folder: Path, prompt: list[int]) -> torch.Tensor:
    loaded = load_model(folder, torch.float32, CPU)
    runner = ModelRunner(loaded, TorchBackend(loaded.geometry, 16, 12, loaded.dtype), 16)
    return logits(runner, (tuple(prompt), 0, tuple(range(1, 9))))[0]


def expected_logits(dense: Path, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = reference_model(dense)(torch.tensor([prompt]), use_cache=False).logits[0, -1]
    return found


@pytest.mark.parametrize("name", CASES)
def test_weights_are_exactly_the_dequantized_ones(folders: Folders, name: str) -> None:
    folder, dense = folders(name)
    checkpoint, expected = Checkpoint(folder), load_file(dense / "model.safetensors")
    found = matrices_of_experts({name: checkpoint.stored(name) for name in checkpoint.names})
    assert expected.keys() <= set(found)
    for tensor, values in expected.items():
        assert torch.equal(found[tensor][...].float(), values), tensor


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_dequantized_weights(folders: Folders, name: str) -> None:
    folder, dense = folders(name)
    for prompt in random_prompts():
        expected = expected_logits(dense, prompt)
        torch.testing.assert_close(last_logits(folder, prompt), expected, rtol=1e-5, atol=1e-5 * float(expected.std()))


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_the_dequantized_weights_in_five_ways(folders: Folders, name: str) -> None:
    folder, dense = folders(name)
    prompts = random_prompts()
    different = {token for tokens in greedy_reference(dense, prompts, 24) for token in tokens}
    assert len(different) > 10
    found = served(folder, dense, prompts, Judgement("equal"))
    assert found.outcome == "equal", found.reason
    assert found.hits > 0
    assert found.preemptions > 0
    assert found.ties == 0


@pytest.mark.parametrize("name", COMMITTED)
def test_committed_checkpoints_are_small_and_what_their_writer_writes(name: str, tmp_path: Path) -> None:
    made = write(name, tmp_path / name)
    files = sorted(path.name for path in made.iterdir())
    assert sorted(path.name for path in (FOLDER / name).iterdir()) == files
    assert sum(path.stat().st_size for path in (FOLDER / name).iterdir()) < MOST_BYTES
    for file in files:
        if file.endswith(".json"):
            assert json.loads((FOLDER / name / file).read_text()) == json.loads((made / file).read_text())
    found, expected = (load_file(one / "model.safetensors") for one in (FOLDER / name, made))
    assert found.keys() == expected.keys()
    for tensor, one in expected.items():
        assert one.dtype == found[tensor].dtype
        assert torch.equal(one, found[tensor]), tensor


@pytest.fixture
def copied(tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: Path(shutil.copytree(FOLDER / name, tmp_path / name))


def test_a_file_may_have_the_name_that_autogptq_gave_it(copied: Callable[[str], Path], folders: Folders) -> None:
    folder = copied("gptq-v1-sym-g32")
    (folder / "model.safetensors").rename(folder / "gptq_model-4bit-32g.safetensors")
    prompt = random_prompts()[0]
    assert torch.equal(last_logits(folder, prompt), last_logits(FOLDER / "gptq-v1-sym-g32", prompt))
    with pytest.raises(InvalidModelFile, match=r"^tokenizer\.json is missing"):  # as of any of these folders
        check_folder(folder)
    (folder / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}')
    check_folder(folder)
    shutil.copy(folder / "gptq_model-4bit-32g.safetensors", folder / "gptq_model-4bit-128g.safetensors")
    with pytest.raises(InvalidModelFile, match=r"model\.safetensors is missing"):
        check_folder(folder)


def test_fields_of_old_awq_files_are_known(copied: Callable[[str], Path]) -> None:
    folder = copied("awq-g64")
    change_configuration(folder, lambda config: config.pop("quantization_config"))
    with pytest.raises(ModelUnsupported, match=r"by AWQ, .* and quant_config\.json is missing"):
        load_model(folder, torch.float32, CPU)
    old = {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}
    (folder / "quant_config.json").write_text(json.dumps(old))
    prompt = random_prompts()[0]
    assert torch.equal(last_logits(folder, prompt), last_logits(FOLDER / "awq-g64", prompt))


def test_a_bias_that_the_model_lacks_must_be_zero(copied: Callable[[str], Path]) -> None:
    folder = copied("gptq-v1-sym-g32")
    path, name = folder / "model.safetensors", "model.layers.1.mlp.up_proj.bias"
    tensors = load_file(path)
    assert name in tensors
    tensors[name][3] = 0.5
    save_file(tensors, path)
    with pytest.raises(ModelUnsupported, match=rf"its files have the unknown tensor {name}$"):
        load_model(folder, torch.float32, CPU)


def test_a_group_index_out_of_range_is_refused_when_the_model_is_loaded(copied: Callable[[str], Path]) -> None:
    folder = copied("gptq-v2-asym-g64-act-order")
    path, name = folder / "model.safetensors", "model.layers.1.mlp.up_proj.g_idx"
    tensors = load_file(path)
    tensors[name][3] = 2
    save_file(tensors, path)
    with pytest.raises(ModelUnsupported, match=rf"its tensor {name} has group 2 of 2 groups$"):
        load_model(folder, torch.float32, CPU)


def change_configuration(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
