"""Modules whose quantized matrices are decoded where they are used."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.attention.torch_backend import TorchBackend
from engine.errors import ModelUnsupported
from engine.model import weights
from engine.model.decoded_weights import decode
from engine.model.loaded import LoadedModel
from engine.model.loading import load_model
from engine.native.formats.gguf.header import read_header
from engine.run.runner import ModelRunner
from services.models.model_store import resolve
from tests.engine.decoding import logits as logits_of
from tests.engine.decoding import prompt
from tests.gguf_models import MIXED, write_llama

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("gguf")
    path = write_llama(place / "tiny.gguf", MIXED)
    return resolve(str(path), place / "cache", lambda *_: None)


def logits(loaded: LoadedModel) -> torch.Tensor:
    runner = ModelRunner(loaded, TorchBackend(loaded.geometry, 16, 4, loaded.dtype), 16)
    return logits_of(runner, (prompt(20, 1), 0, (1, 2)))


@pytest.mark.parametrize("method", ["auto", "int8", "int4"])
def test_they_compute_what_loaded_weights_do_without_their_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    loaded = load_model(folder, torch.bfloat16, CPU, method)  # type: ignore[arg-type]
    monkeypatch.setattr(weights, "LOADED_BYTES", 0)
    decoded = load_model(folder, torch.bfloat16, CPU, method, packed=True)  # type: ignore[arg-type]
    expected = logits(loaded)
    torch.testing.assert_close(logits(decoded), expected, rtol=0, atol=0)
    whole, part = (
        sum(one.untyped_storage().nbytes() for one in model.model.parameters()) for model in (loaded, decoded)
    )
    assert part < whole / 20
    decode(decoded.model)
    torch.testing.assert_close(logits(decoded), expected, rtol=0, atol=0)
    assert decoded.model.lm_head.weight is decoded.model.model.embed_tokens.weight
    assert {name: one.shape for name, one in decoded.model.named_parameters()} == {
        name: one.shape for name, one in loaded.model.named_parameters()
    }


def test_weights_that_are_not_finite_are_refused_when_they_are_decoded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "LOADED_BYTES", 0)
    made = Path(shutil.copytree(folder, tmp_path / "model"))
    path = made / "tiny.gguf"
    begin = read_header(path).tensors["blk.1.ffn_up.weight"].offset
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(np.float16("inf").tobytes())
    model = load_model(made, torch.bfloat16, CPU, packed=True).model
    with pytest.raises(ModelUnsupported, match=r"^its tensor model\.layers\.1\.mlp\.up_proj\.weight has weights "):
        decode(model)
