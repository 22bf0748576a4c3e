"""Folders of a GGUF file's dequantized weights, for peers that cannot read it."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.weights.peer_models import export_commands, variables, write_dequantized
from services.models.gguf_conversion import convert
from tests.gguf_models import MIXED, write_llama


def test_a_folder_has_the_values_that_a_file_stands_for(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    file = write_llama(source / "model.gguf", MIXED)
    convert(file, source)
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        write_dequantized(source, tmp_path / name, dtype)
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert config["torch_dtype"] == config["dtype"] == name
        assert config["rope_theta"] == config["rope_parameters"]["rope_theta"]
    expected = AutoModelForCausalLM.from_pretrained(source, gguf_file=file.name).state_dict()
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "float32").state_dict()
    assert all(torch.allclose(written[name], value, atol=1e-3) for name, value in expected.items())
    smaller = AutoModelForCausalLM.from_pretrained(tmp_path / "bfloat16").state_dict()
    assert all(torch.equal(smaller[name], value.bfloat16()) for name, value in written.items())


def test_a_folder_without_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no GGUF file"):
        write_dequantized(tmp_path, tmp_path / "bfloat16", torch.bfloat16)


def test_each_export_has_a_variable_that_names_its_folder(tmp_path: Path) -> None:
    written = [command.split()[-1] for command in export_commands(tmp_path)]
    named = dict(line.removeprefix("export ").split("=") for line in variables(tmp_path))
    assert [*named.values()] == [str(tmp_path / "bfloat16"), *written]
