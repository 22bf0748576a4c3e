"""Configurations that are written for GGUF files, and files that are refused before anything is written."""

import json
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from engine.errors import ModelUnsupported
from engine.model.loading import load_model
from engine.parallel.loading import ModelFolder
from services.models.gguf_conversion import convert
from tests.gguf_models import HEADS, HIDDEN, MIXED, Changes, write_gpt2, write_llama

HALF = HIDDEN // HEADS // 2


def configuration(path: Path, change: Changes, architecture: str = "llama") -> dict[str, object]:
    convert(write_llama(path / "tiny.gguf", MIXED, architecture, change), path / "folder")
    read: dict[str, object] = json.loads((path / "folder" / "config.json").read_text())
    return read


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

    def biased(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.attn_q.bias", np.zeros(HIDDEN, np.float32))

    assert configuration(tmp_path, lambda _writer: None)["attention_bias"] is False
    assert configuration(tmp_path, biased)["attention_bias"] is True


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
