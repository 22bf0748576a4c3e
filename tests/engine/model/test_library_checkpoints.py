"""Checkpoints that the formats' own libraries wrote are the dense models that they code."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.attention.torch_backend import TorchBackend
from engine.model.checkpoint import Checkpoint
from engine.model.loading import load_model
from engine.run.runner import ModelRunner
from tests.engine.decoding import logits
from tests.engine.native.formats.quantized.twins import COMPRESSED, EXPERTS, GGUF, dequantized
from tests.model_types.judgement import Judgement, random_prompts, served
from tests.reference import greedy_reference, reference_model

FOLDERS = Path(__file__).parents[2] / "data" / "quantized"
NAMES = sorted(path.name for kind in (*COMPRESSED, *EXPERTS, *GGUF) for path in FOLDERS.glob(f"{kind}*"))
CPU = torch.device("cpu")
MOST_BYTES = 200_000
_PARTS = ("packed", "shape", "g_idx", "zero_point", "blocks", "SCB", "weight_format", "absmax", "map", "nf4", "fp4")

Dense = Callable[[str], Path]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Dense:
    """Return a folder's values as an ordinary checkpoint in float32."""
    made: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            write_dense(FOLDERS / name, made[name])
        return made[name]

    return find


def write_dense(folder: Path, target: Path) -> None:
    configuration = json.loads((folder / "config.json").read_text())
    configuration.pop("quantization_config", None)
    (target / "config.json").write_text(json.dumps(configuration | {"dtype": "float32"}))
    tensors = {name: one.float().contiguous() for name, one in dequantized(folder).items()}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_dequantized_weights(dense: Dense, name: str) -> None:
    loaded = load_model(FOLDERS / name, torch.float32, CPU)
    runner = ModelRunner(loaded, TorchBackend(loaded.geometry, 16, 12, loaded.dtype), 16)
    reference = reference_model(dense(name))
    for prompt in random_prompts():
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt]), use_cache=False).logits[0, -1]
        found = logits(runner, (tuple(prompt), 0, tuple(range(1, 9))))[0]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.std()))


@pytest.mark.parametrize("name", {name.partition("-")[0]: name for name in NAMES}.values())  # one of each method
def test_tokens_are_those_of_the_dequantized_weights_in_five_ways(dense: Dense, name: str) -> None:
    prompts = random_prompts()
    assert len({token for tokens in greedy_reference(dense(name), prompts, 24) for token in tokens}) > 10
    found = served(FOLDERS / name, dense(name), prompts, Judgement("equal"))
    assert found.outcome == "equal", found.reason
    assert found.hits > 0
    assert found.preemptions > 0


@pytest.mark.parametrize("name", NAMES)
def test_tensors_have_dense_names_only(name: str) -> None:
    names = Checkpoint(FOLDERS / name).names
    assert not [one for one in names if "scale" in one or one.endswith(_PARTS)]


def test_folders_are_small() -> None:
    sizes = {name: sum(path.stat().st_size for path in (FOLDERS / name).iterdir()) for name in NAMES}
    assert {name: size for name, size in sizes.items() if size >= MOST_BYTES} == {}
