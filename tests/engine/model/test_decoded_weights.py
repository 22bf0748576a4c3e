"""Modules whose quantized matrices are decoded where they are used."""

import shutil
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.attention.torch_backend import TorchBackend
from engine.errors import ModelUnsupported
from engine.model import weights
from engine.model.decoded_weights import decode, decode_on_use
from engine.model.loaded import LoadedModel
from engine.model.loading import load_model
from engine.native.formats.gguf.header import read_header
from engine.native.formats.tensors import StoredTensor
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


class Counted:
    """A stored matrix that counts the numbers which were decoded."""

    def __init__(self, stored: StoredTensor) -> None:
        self.stored, self.decoded = stored, 0

    def get_shape(self) -> list[int]:
        return self.stored.get_shape()

    def __getitem__(self, part: Any) -> torch.Tensor:
        found = self.stored[part]
        self.decoded += found.numel()
        return found


def test_a_load_decodes_rows_of_the_embedding_alone_and_a_forward_pass_each_matrix_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: dict[str, Counted] = {}

    def on_use(model: Any, matrices: dict[str, StoredTensor]) -> None:
        counted.update({name: Counted(one) for name, one in matrices.items()})
        decode_on_use(model, dict(counted))

    monkeypatch.setattr(weights, "LOADED_BYTES", 0)
    monkeypatch.setattr(weights, "decode_on_use", on_use)
    loaded = load_model(folder, torch.bfloat16, CPU, packed=True)
    others = {name: one for name, one in counted.items() if "embed_tokens" not in name}
    assert others
    assert not any(one.decoded for one in others.values())
    logits(loaded)
    assert {name: one.decoded for name, one in others.items()} == {
        name: prod(one.get_shape()) for name, one in others.items()
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
