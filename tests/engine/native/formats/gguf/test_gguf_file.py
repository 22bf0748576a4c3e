"""Weights of GGUF files by transformers' names, and the slices that decoders and ranks read."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.errors import ModelUnsupported
from engine.native.formats.gguf.file import GgufFile, gguf_of, quantized_format
from engine.native.formats.gguf.header import read_header
from engine.native.formats.stored import files_of
from engine.native.llama_weights import FileWeights
from tests.gguf_models import HEADS, HIDDEN, KV_HEADS, MIXED, Type, write_llama


def with_head(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("output.weight", np.random.default_rng(1).standard_normal((384, HIDDEN)).astype(np.float16))


def with_biases(writer: gguf.GGUFWriter) -> None:
    for layer in range(2):
        for name, rows in (("attn_q", HIDDEN), ("attn_k", HIDDEN // 2), ("attn_v", HIDDEN // 2)):
            writer.add_tensor(f"blk.{layer}.{name}.bias", np.arange(rows, dtype=np.float32) / rows)


@pytest.mark.parametrize(
    ("architecture", "change"),
    [("llama", with_head), *((architecture, lambda _writer: None) for architecture in ("llama", "qwen2", "qwen3"))],
    ids=["llama", "llama with a tied head", "qwen2", "qwen3"],
)
def test_all_tensors_equal_those_that_transformers_reads(tmp_path: Path, architecture: str, change: object) -> None:
    path = write_llama(tmp_path / "tiny.gguf", MIXED, architecture, change)  # type: ignore[arg-type]
    sizes = {"head_dim": HIDDEN // HEADS} if architecture == "qwen3" else {}  # transformers does not read it
    model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32, **sizes)
    expected, file = model.state_dict(), GgufFile(path, torch.float32)
    assert set(expected) - set(file.keys()) <= {"lm_head.weight"}
    assert set(file.keys()) <= set(expected)
    for name in file.keys():  # noqa: SIM118 - it is no dictionary
        torch.testing.assert_close(file.get_tensor(name).float(), expected[name], rtol=0, atol=0)


def test_biases_of_llama_are_reordered_with_their_rows(tmp_path: Path) -> None:
    file = GgufFile(write_llama(tmp_path / "tiny.gguf", MIXED, change=with_biases), torch.float32)
    keys = file.get_tensor("model.layers.0.self_attn.k_proj.bias").view(KV_HEADS, 2, -1)
    # A head's rows alternate between its halves in the file.
    in_file = torch.arange(HIDDEN // 2).view(KV_HEADS, -1) / (HIDDEN // 2)
    torch.testing.assert_close(keys, torch.stack([in_file[:, ::2], in_file[:, 1::2]], dim=1))


def test_rows_and_columns_are_slices_of_the_whole(tmp_path: Path) -> None:
    file = GgufFile(write_llama(tmp_path / "tiny.gguf", MIXED | {"ffn_gate": Type.F16}), torch.bfloat16)
    for name in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj", "mlp.gate_proj"):
        tensor = file.get_slice(f"model.layers.1.{name}.weight")
        whole = tensor[...]
        assert whole.dtype == (torch.float16 if name == "mlp.gate_proj" else torch.bfloat16)
        assert list(whole.shape) == tensor.get_shape()
        assert torch.equal(tensor[slice(64, 128)], whole[64:128])
        assert torch.equal(tensor[slice(64, 96), slice(32, 128)], whole[64:96, 32:128])
        assert tensor[slice(7, 7)].shape == (0, HIDDEN)


def test_groups_are_those_of_the_file_and_none_if_bf16_is_requested(tmp_path: Path) -> None:
    write_llama(tmp_path / "tiny.gguf", MIXED)
    packed, dense = FileWeights(tmp_path), FileWeights(tmp_path, "bf16")
    bits = {"q": 4, "k": 4, "v": 6, "o": 5}
    for letter, count in bits.items():
        name = f"model.layers.0.self_attn.{letter}_proj.weight"
        grouped = packed.grouped(name)
        assert grouped is not None
        assert grouped.bits == count
        values = torch.from_numpy(grouped.dense())
        assert torch.equal(values.bfloat16(), dense.tensor(name))
        rows = packed.grouped(name, slice(16, 48))
        assert rows is not None
        np.testing.assert_array_equal(rows.dense(), grouped.dense()[16:48])
        assert dense.grouped(name) is None
    assert packed.grouped("model.norm.weight") is packed.grouped("no.such.weight") is None
    head, embedding = packed.grouped("lm_head.weight"), packed.grouped("model.embed_tokens.weight")
    assert head is not None
    assert embedding is not None
    assert packed.tied()
    np.testing.assert_array_equal(head.codes, embedding.codes)


@pytest.mark.parametrize("method", ["int8", "int4"])
def test_matrices_are_quantized_at_load_from_the_files_values(tmp_path: Path, method: str) -> None:
    write_llama(tmp_path / "tiny.gguf", MIXED, change=with_head)
    weights, dense = FileWeights(tmp_path, method), files_of(tmp_path, torch.float32)  # type: ignore[arg-type]
    for name in ("model.layers.0.mlp.up_proj.weight", "lm_head.weight"):
        found = weights.grouped(name)
        assert found is not None
        assert found.bits == int(method[-1])
        error = (torch.from_numpy(found.dense()) - dense[name].get_slice(name)[...].float()).abs().max()
        assert error < {8: 0.02, 4: 0.3}[found.bits] * dense[name].get_slice(name)[...].float().abs().max()
        tensor = weights.tensor(name)
        assert tensor is not None
        assert torch.equal(tensor, torch.from_numpy(found.dense()).bfloat16())
    # Embeddings beside a head are read a row at a time, and stay as the file has them.
    embedding = weights.grouped("model.embed_tokens.weight")
    assert embedding is not None
    assert (embedding.bits, embedding.group) == (8, 32)
    assert not weights.tied()


def test_the_format_is_that_of_most_quantized_weights(tmp_path: Path) -> None:
    assert quantized_format(write_llama(tmp_path / "mixed.gguf", MIXED)) == "Q6_K"
    assert quantized_format(write_llama(tmp_path / "one.gguf", {"ffn_up": Type.Q8_0})) == "Q8_0"
    assert quantized_format(write_llama(tmp_path / "none.gguf", {"ffn_up": Type.F16, "attn_q": Type.BF16})) == ""


def test_safetensors_files_come_first_and_several_gguf_files_are_refused(tmp_path: Path) -> None:
    assert gguf_of(tmp_path) is None
    (tmp_path / "a.gguf").touch()
    assert gguf_of(tmp_path) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ModelUnsupported, match=r"has several \.gguf files: a\.gguf, b\.gguf$"):
        gguf_of(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert gguf_of(tmp_path) is None


def test_numbers_of_a_file_that_are_not_finite_are_refused_with_their_tensor(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "tiny.gguf", MIXED)
    infinite = np.float16("inf").tobytes()
    content, places = bytearray(path.read_bytes()), read_header(path).tensors
    for stored in ("blk.1.attn_q.weight", "blk.1.ffn_gate.weight"):  # the scale of a block of Q4_K, and of Q4_0
        content[places[stored].offset : places[stored].offset + 2] = infinite
    begin = places["blk.0.attn_norm.weight"].offset
    content[begin : begin + 4] = np.float32("nan").tobytes()
    path.write_bytes(content)
    weights = FileWeights(tmp_path)
    for name in ("self_attn.q_proj", "mlp.gate_proj"):
        full = f"model.layers.1.{name}.weight"
        with pytest.raises(ModelUnsupported, match=f"^its tensor {full} has weights that are not finite"):
            weights.grouped(full)
    with pytest.raises(ModelUnsupported, match=r"its tensor model\.layers\.0\.input_layernorm\.weight has weights "):
        weights.tensor("model.layers.0.input_layernorm.weight")
    assert weights.grouped("model.layers.1.mlp.up_proj.weight") is not None


@pytest.mark.parametrize("exponent", [252, 253, 255])
def test_weights_of_mxfp4_that_are_not_finite_are_refused_with_their_tensor(tmp_path: Path, exponent: int) -> None:
    path = write_llama(tmp_path / "tiny.gguf", {"ffn_up": Type.MXFP4})
    content, place = bytearray(path.read_bytes()), read_header(path).tensors["blk.1.ffn_up.weight"]
    content[place.offset : place.offset + 2] = exponent, 7  # the largest value
    path.write_bytes(content)
    name, weights = "model.layers.1.mlp.up_proj.weight", FileWeights(tmp_path)
    if exponent == 252:
        assert weights.grouped(name) is not None
        return
    for read in (weights.grouped, weights.tensor):
        with pytest.raises(ModelUnsupported, match=f"^its tensor {name} has weights that are not finite"):
            read(name)


def test_numbers_that_only_float32_can_hold_are_refused_with_their_tensor(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "tiny.gguf", MIXED)
    content, place = bytearray(path.read_bytes()), read_header(path).tensors["blk.0.attn_norm.weight"]
    content[place.offset : place.offset + 4] = np.float32(-3.4e38).tobytes()
    path.write_bytes(content)
    name = "model.layers.0.input_layernorm.weight"
    with pytest.raises(ModelUnsupported, match=rf"^its tensor {name} has weights .* too large for bfloat16$"):
        FileWeights(tmp_path).tensor(name)
    assert files_of(tmp_path, torch.float32)[name].get_slice(name)[...][0] == np.float32(-3.4e38)
