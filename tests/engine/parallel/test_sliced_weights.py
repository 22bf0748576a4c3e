"""A rank's slices reach its device through bounded buffers, each in its place, without a second copy."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from engine.attention.llama_shape import LlamaShape
from engine.errors import ModelUnsupported
from engine.model.staging import Staging
from engine.native.formats.gguf.file import GgufFile
from engine.parallel import OneRank, Shard
from engine.parallel.llama_slice import LlamaSlice
from engine.parallel.sliced_weights import ALL, SlicedWeights
from tests.engine.families import FAMILIES
from tests.engine.families import Checkpoint as Folder
from tests.engine.late_device import PIECE_BYTES, FakeDevice
from tests.engine.model.peak_memory import peak_bytes
from tests.gguf_models import MIXED, write_llama
from tests.tiny_models import usual_size

CPU = torch.device("cpu")
LAYER = "model.layers.0"

Tiny = Callable[[str], Path]


class Rank(OneRank):
    """A rank that computes nothing."""

    def __init__(self, shard: Shard) -> None:
        self.rank, self.size = shard.rank, shard.size


def slices(folder: Path, dtype: torch.dtype = torch.bfloat16, staging: Staging | None = None) -> SlicedWeights:
    return SlicedWeights(folder, dtype, CPU, staging)


def slice_of(folder: Path, shard: Shard, weights: SlicedWeights) -> LlamaSlice:
    shape = LlamaShape.of(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)))
    return LlamaSlice.read(shape, weights, Rank(shard), 64)


def tensors_of(own: LlamaSlice) -> list[torch.Tensor]:
    weights = own.weights
    values = [getattr(layer, one.name) for layer in weights.layers for one in fields(layer)]
    values = [tensor for value in values for tensor in (value if isinstance(value, tuple) else (value,))]
    return [weights.embedding, weights.head, weights.final_norm, *(one for one in values if torch.is_tensor(one))]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("shard", [Shard(0, 1), Shard(1, 2)], ids=str)
def test_the_weights_of_a_rank_are_the_same_through_staging(checkpoint: Folder, kind: str, shard: Shard) -> None:
    folder, device = checkpoint(FAMILIES[kind]), FakeDevice()
    expected, staged = slices(folder), slices(folder, staging=device.staging)
    pairs = zip(*(map(tensors_of, (slice_of(folder, shard, expected), slice_of(folder, shard, staged)))), strict=True)
    for ours, theirs in pairs:
        assert torch.equal(ours, theirs)
        assert theirs.is_contiguous()
    assert staged.read_bytes == expected.read_bytes > 0
    assert [len(one) for one in device.buffers] == [PIECE_BYTES] * 2


@pytest.mark.parametrize("device", [None, FakeDevice()], ids=["without staging", "with staging"])
def test_rows_of_several_tensors_are_one_tensor(tiny_model: Tiny, device: FakeDevice | None) -> None:
    stored = load_file(tiny_model("llama") / "model.safetensors")
    parts = [
        (f"{LAYER}.self_attn.{name}_proj.weight", rows) for name, rows in zip("qk", (slice(3, 40), ALL), strict=True)
    ]
    weights = slices(tiny_model("llama"), staging=device.staging if device else None)
    found = weights.together(parts)
    weights.finish()
    assert torch.equal(found, torch.cat([stored[name][rows] for name, rows in parts]).bfloat16())


@usual_size
def test_tensors_that_are_fused_take_the_memory_of_the_fused_one(tiny_model: Tiny) -> None:
    staging = FakeDevice().staging
    weights = slices(tiny_model("llama"), torch.float32, staging)
    parts = [(f"{LAYER}.mlp.{name}_proj.weight", ALL) for name in ("gate", "up")]

    def read() -> torch.Tensor:
        whole = weights.together(parts)
        weights.finish()
        return whole

    size = read().nbytes
    assert size <= peak_bytes(read) < size + PIECE_BYTES


def test_tensors_that_no_file_has_or_whose_rows_differ_are_refused_by_name(tmp_path: Path) -> None:
    save_file({"wide": torch.zeros(2, 5), "narrow": torch.zeros(2, 4)}, tmp_path / "model.safetensors")
    weights = slices(tmp_path)
    with pytest.raises(ModelUnsupported, match=r"^its weights have no tensor other$"):
        weights.together([("wide", ALL), ("other", ALL)])
    with pytest.raises(ModelUnsupported, match=r"^its tensors wide, narrow have rows of different shapes$"):
        weights.together([("wide", ALL), ("narrow", ALL)])
    assert weights.read_bytes == 0


@pytest.mark.parametrize("device", [None, FakeDevice()], ids=["without staging", "with staging"])
def test_slices_of_a_gguf_file_are_those_of_its_values(tmp_path: Path, device: FakeDevice | None) -> None:
    path = write_llama(tmp_path / "tiny.gguf", MIXED)
    whole = GgufFile(path, torch.float32)
    weights = slices(tmp_path, torch.float32, device.staging if device else None)
    for name, rows, columns in (
        ("self_attn.q_proj", slice(64, 192), None),
        ("self_attn.o_proj", ALL, slice(128, 256)),
        ("mlp.down_proj", ALL, slice(0, 128)),
    ):
        full = f"model.layers.1.{name}.weight"
        found = weights.tensor(full, rows, columns)
        weights.finish()
        assert torch.equal(found, whole.get_tensor(full)[rows, columns or ALL])


@pytest.mark.parametrize("device", [None, FakeDevice()], ids=["without staging", "with staging"])
def test_slices_that_are_not_finite_are_refused_by_name(tmp_path: Path, device: FakeDevice | None) -> None:
    values = {"good": torch.zeros(4, 5), "bad": torch.zeros(4, 5)}
    values["bad"][3, 2] = float("nan")
    save_file(values, tmp_path / "model.safetensors")
    weights = slices(tmp_path, staging=device.staging if device else None)
    weights.tensor("good")
    weights.tensor("bad", slice(0, 3))
    weights.finish()
    weights.together([("good", ALL), ("bad", slice(2, 4))])
    with pytest.raises(ModelUnsupported, match=r"^its tensor bad has weights that are not finite, or too large for "):
        weights.finish()
