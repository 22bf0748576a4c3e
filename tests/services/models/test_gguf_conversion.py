"""Configurations that are written for GGUF files, and files that are refused before anything is written."""

import json
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from engine.errors import ModelUnsupported
from engine.model.gguf_configuration import gguf_configuration
from engine.model.loading import load_model
from engine.native.formats.gguf.file import GgufFile
from engine.parallel.loading import ModelFolder
from services.models.files.bounded_json import InvalidModelFile
from services.models.gguf.file_check import check_gguf
from services.models.gguf_conversion import convert
from tests.gguf_models import HEADS, HIDDEN, KV_HEADS, LAYERS, MIXED, OTHERS, SHAPES, Changes, write_gpt2, write_llama

HALF = HIDDEN // HEADS // 2


def configuration(path: Path, change: Changes, architecture: str = "llama") -> dict[str, object]:
    convert(write_llama(path / "tiny.gguf", MIXED, architecture, change), path / "folder")
    read: dict[str, object] = json.loads((path / "folder" / "config.json").read_text())
    return read


def biased(*parts: str) -> Changes:
    """Give all layers biases of these parts."""

    def change(writer: gguf.GGUFWriter) -> None:
        for layer in range(LAYERS):
            for part in parts:
                writer.add_tensor(f"blk.{layer}.{part}.bias", np.arange(SHAPES[part][0], dtype=np.float32))

    return change


def llama3_factors() -> np.ndarray:
    """Llama 3.1's, as llama.cpp's converter writes them: 8 for long waves, 1 for short ones."""
    factors = []
    for frequency in 10000.0 ** -(np.arange(0, 2 * HALF, 2) / (2 * HALF)):
        length = 2 * np.pi / frequency
        smooth = (8192 / length - 1) / (4 - 1)
        factors.append(1 if length < 8192 / 4 else 8 if length > 8192 else 1 / ((1 - smooth) / 8 + smooth))
    return np.array(factors, dtype=np.float32)


def test_rotations_of_llama_3_are_read_from_their_factors(tmp_path: Path) -> None:
    found = configuration(tmp_path, lambda writer: writer.add_tensor("rope_freqs.weight", llama3_factors()))
    assert found["rope_parameters"] == {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_linear_rotations_are_read_and_others_refused(tmp_path: Path) -> None:
    def linear(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    assert configuration(tmp_path, linear)["rope_parameters"] == {
        "rope_type": "linear",
        "rope_theta": 10000.0,
        "factor": 4.0,
    }
    with pytest.raises(ModelUnsupported, match=r"its llama\.rope\.scaling\.type is 'yarn', and such"):
        configuration(tmp_path, lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN))
    with pytest.raises(ModelUnsupported, match=re.escape("tensor rope_freqs.weight has factors other than those")):
        configuration(
            tmp_path, lambda writer: writer.add_tensor("rope_freqs.weight", np.linspace(1, 8, HALF, dtype=np.float32))
        )


def test_sizes_and_biases_that_transformers_does_not_read_are_those_of_the_file(tmp_path: Path) -> None:
    assert configuration(tmp_path, lambda _writer: None, "qwen3")["head_dim"] == HIDDEN // HEADS

    plain = configuration(tmp_path, lambda _writer: None)
    assert (plain["attention_bias"], plain["mlp_bias"]) == (False, False)
    attention = configuration(tmp_path, biased("attn_q", "attn_k", "attn_v", "attn_output"))
    assert (attention["attention_bias"], attention["mlp_bias"]) == (True, False)
    assert configuration(tmp_path, biased("ffn_gate", "ffn_up", "ffn_down"))["mlp_bias"] is True


@pytest.mark.parametrize(
    ("change", "biases"),
    [
        (lambda _file: None, 0),
        (lambda file: file.add_array("llama.attention.head_count_kv", [KV_HEADS] * LAYERS), 0),
        (lambda file: biased("attn_q", "attn_k", "attn_v", "attn_output")(file), 4),
        (lambda file: biased("ffn_gate", "ffn_up", "ffn_down")(file), 3),
    ],
    ids=["plain", "heads by layer", "biases of attention", "biases of the MLP"],
)
def test_a_converted_file_is_loaded_with_all_its_tensors(tmp_path: Path, change: Changes, biases: int) -> None:
    path = write_llama(tmp_path / "tiny.gguf", MIXED, change=change)
    convert(path, tmp_path / "folder")
    (tmp_path / "folder" / path.name).symlink_to(path)
    loaded = load_model(tmp_path / "folder", torch.float32, torch.device("cpu")).model.state_dict()
    file = GgufFile(path, torch.float32)
    assert sum(name.endswith(".bias") for name in loaded) == biases * LAYERS
    assert set(loaded) - {"lm_head.weight"} == set(file.keys())
    assert all(torch.equal(loaded[name], file.get_tensor(name)) for name in set(file.keys()))


@pytest.mark.parametrize(
    ("parts", "lacking"),
    [
        (("attn_q",), "attn_k.bias, although it has blk.0.attn_q.bias"),
        (("attn_q", "attn_k", "attn_v"), "attn_output.bias, although it has blk.0.attn_q.bias"),
        (("attn_output",), "attn_q.bias, although it has blk.0.attn_output.bias"),
        (("ffn_up",), "ffn_gate.bias, although it has blk.0.ffn_up.bias"),
    ],
)
def test_a_bias_without_those_that_belong_to_it_is_refused_by_name(
    tmp_path: Path, parts: tuple[str, ...], lacking: str
) -> None:
    path = write_llama(tmp_path / "tiny.gguf", MIXED, change=biased(*parts))
    sentence = rf"it lacks tensor blk\.0\.{lacking}: they only go together$"
    with pytest.raises(InvalidModelFile, match=rf"^tiny\.gguf: {sentence}"):
        check_gguf(path)
    with pytest.raises(ModelUnsupported, match=f"^{sentence}"):
        convert(path, tmp_path / "folder")


@pytest.mark.parametrize(("architecture", "part"), [("qwen2", "attn_k.bias"), ("qwen3", "attn_q_norm.weight")])
def test_a_file_without_tensors_that_its_architecture_needs_is_refused(
    tmp_path: Path, architecture: str, part: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OTHERS, architecture, {name: one for name, one in OTHERS[architecture].items() if name != part})
        path = write_llama(tmp_path / "tiny.gguf", MIXED, architecture)
    with pytest.raises(InvalidModelFile, match=rf"^tiny\.gguf: it lacks tensor blk\.0\.{re.escape(part)}"):
        check_gguf(path)


@pytest.mark.parametrize("name", ["blk.0.attn_sinks.weight", "blk.7.zzz.weight", "blk.0.attn_norm.bias", "other"])
def test_a_tensor_that_the_architecture_does_not_know_is_refused_by_name(tmp_path: Path, name: str) -> None:
    path = write_llama(
        tmp_path / "tiny.gguf", MIXED, change=lambda writer: writer.add_tensor(name, np.ones(HIDDEN, np.float32))
    )
    with pytest.raises(InvalidModelFile, match=rf"^tiny\.gguf: it has the unknown tensor {re.escape(name)}$"):
        check_gguf(path)


def test_a_file_that_cannot_be_served_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "tiny.gguf", MIXED)
    path.write_bytes(path.read_bytes()[:-4096])
    with pytest.raises(ModelUnsupported, match=r"it is truncated: tensor blk\.1\.ffn_down\.weight"):
        convert(path, tmp_path / "folder")
    with pytest.raises(ModelUnsupported, match=r"it lacks tensor blk\.0\.ffn_up\.weight"):
        convert(write_llama(path, MIXED, without=("blk.0.ffn_up",)), tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_other_families_are_loaded_by_transformers_and_not_by_several_ranks(tmp_path: Path) -> None:
    path = write_gpt2(tmp_path / "tiny.gguf")
    convert(path, tmp_path / "folder")
    (tmp_path / "folder" / path.name).symlink_to(path)
    loaded = load_model(tmp_path / "folder", torch.float32, torch.device("cpu")).model.state_dict()
    stored = next(one for one in gguf.GGUFReader(path).tensors if one.name == "blk.1.ffn_down.weight")
    values = torch.from_numpy(gguf.quants.dequantize(stored.data, stored.tensor_type).copy())
    assert torch.equal(loaded["transformer.h.1.mlp.c_proj.weight"], values.T)
    with pytest.raises(ModelUnsupported, match="of GGUF files, several ranks can share Llama-shaped models only"):
        ModelFolder(tmp_path / "folder", 2)


def test_a_model_that_transformers_reads_is_refused_in_several_parts(tmp_path: Path) -> None:
    path = write_gpt2(tmp_path / "tiny.gguf", part_tensors=20)
    with pytest.raises(ModelUnsupported, match=r"^models of gpt2 are read from one file, not from 2 parts: merge them"):
        convert(path, tmp_path / "folder")


def test_gpt_oss_is_refused_with_what_helps_before_weights_are_read(tmp_path: Path) -> None:
    """transformers knows its name, but other tensors than those of llama.cpp's converter."""
    path = write_gpt2(tmp_path / "tiny.gguf", architecture="gpt-oss")
    (tmp_path / "config.json").write_text('{"model_type": "gpt_oss"}')
    sentence = r"its general\.architecture is 'gpt-oss', which is not read: use its safetensors files in MXFP4$"
    for read in (gguf_configuration, lambda _path: load_model(tmp_path, torch.float32, torch.device("cpu"))):
        with pytest.raises(ModelUnsupported, match=sentence):
            read(path)


def test_sizes_that_no_tensor_of_the_file_has_are_refused_for_all_families(tmp_path: Path) -> None:
    refused: dict[str, Changes] = {
        "its gpt2.block_count is 1000000000, but it has 28 tensors": lambda writer: writer.add_block_count(10**9),
        "its gpt2.embedding_length is 1048576, but no dimension of its tensors is longer than 1024": (
            lambda writer: writer.add_embedding_length(1 << 20)
        ),
        "its gpt2.expert_count is 5000, but no dimension of": lambda writer: writer.add_expert_count(5000),
    }
    for message, change in refused.items():
        with pytest.raises(ModelUnsupported, match=f"^{message}"):
            convert(write_gpt2(tmp_path / "tiny.gguf", change), tmp_path / "folder")


def test_a_chat_template_that_is_no_jinja_is_refused_by_its_key_and_line(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "tiny.gguf", {}, change=lambda writer: writer.add_chat_template("a\n{% for %}"))
    with pytest.raises(ModelUnsupported, match=r"^tokenizer\.chat_template: line 2: "):
        convert(path, tmp_path / "folder")


def test_a_file_of_another_family_that_lacks_a_layer_is_refused_with_its_tensors(tmp_path: Path) -> None:
    path = write_gpt2(tmp_path / "tiny.gguf", lambda writer: writer.add_block_count(3))
    convert(path, tmp_path / "folder")
    (tmp_path / "folder" / path.name).symlink_to(path)
    with pytest.raises(ModelUnsupported, match=r"its files lack the tensors transformer\.h\.2\.attn\.c_attn\.bias, "):
        load_model(tmp_path / "folder", torch.float32, torch.device("cpu"))
