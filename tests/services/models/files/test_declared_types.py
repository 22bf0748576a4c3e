"""Each field of a `config.json` is checked as transformers checks it, before transformers is imported."""

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig
from transformers.activations import ACT2CLS
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.errors import ModelUnsupported
from engine.model.model_shape import read_shape
from engine.native.formats.image_text import IMAGE_TEXT_TYPES
from services.models.files.bounded_json import InvalidModelFile
from services.models.files.config_schema import WeightType
from services.models.files.declared_names import name_fault
from services.models.files.declared_types import declared_schema
from services.models.files.folder_check import check_configuration
from services.models.files.schemas import check_schema

WRONG: tuple[Any, ...] = (0, 1.5, "x", [], {}, None, True, -1, 1e30)
OF_EACH_KIND: tuple[Any, ...] = (1, 0.5, "x", [], ["x"], [1], {}, None, True)
SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = SMALL | {"intermediate_size": 24, "num_key_value_heads": 1, "head_dim": 8}
COMMON: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "qwen2": GROUPED,
    "qwen3_moe": GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
    "gemma3_text": GROUPED,
    "phi3": GROUPED | {"original_max_position_embeddings": 32},
    "mistral": GROUPED,
    "gpt2": SMALL,
    "opt": SMALL | {"ffn_dim": 24, "word_embed_proj_dim": 16},
}
# The class of one is that of another type; the other, which is not served, has names for the types of its fields.
NOT_READ = ("gpt-sw3", "xlstm")


def refusal(folder: Path, config: Mapping[str, Any]) -> str:
    """Return what is said of a configuration before any process starts; empty if it is accepted."""
    (folder / "config.json").write_text(json.dumps(config))
    try:
        check_configuration(folder)
    except InvalidModelFile as fault:
        return str(fault)
    return ""


def late_refusal(folder: Path) -> str:
    """Return what `quire plan` says of a configuration that was accepted."""
    AutoConfig.from_pretrained(folder)
    try:
        read_shape(folder, torch.float32)
    except ModelUnsupported as fault:
        return str(fault)
    return ""


@pytest.mark.parametrize("name", COMMON)
def test_a_value_of_any_type_in_any_field_is_accepted_or_refused_by_the_field(name: str, tmp_path: Path) -> None:
    config = CONFIG_MAPPING[name](**COMMON[name]).to_dict()
    assert not refusal(tmp_path, config)
    assert not late_refusal(tmp_path)
    for field in config:
        for value in WRONG:
            said = refusal(tmp_path, config | {field: value})
            if said:
                assert said.startswith(f"config.json: {field}"), (field, value)
            elif late := late_refusal(tmp_path):  # of numbers that may be left out, one is needed
                assert value is None, (field, value, late)
                assert "transformers makes no model of it" in late


def faults_by_transformers(kind: Any, field: str, value: Any) -> bool:
    try:
        for check in kind.__validators__.get(field, ()):
            check(value)
    except (TypeError, ValueError):
        return True
    return False


def faults_here(model_type: str, field: str, value: Any) -> bool:
    config = {"model_type": model_type, field: value}
    schema = declared_schema(config)
    assert schema is not None
    try:
        check_schema("config.json", schema, config)
    except InvalidModelFile:
        return True
    return False


def differences(model_type: str) -> Iterator[tuple[str, Any]]:
    kind = CONFIG_MAPPING[model_type]
    for field in dataclasses.fields(kind):
        if field.name not in kind.sub_configs_defaults:
            for value in OF_EACH_KIND:
                if faults_by_transformers(kind, field.name, value) != faults_here(model_type, field.name, value):
                    yield field.name, value


@pytest.mark.parametrize("model_type", sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *IMAGE_TEXT_TYPES} - {*NOT_READ}))
def test_the_types_that_are_read_are_those_that_transformers_checks(model_type: str) -> None:
    assert not list(differences(model_type))


@pytest.mark.parametrize(
    ("part", "fault"),
    [
        ({"text_config": {"rms_norm_eps": 1}}, "text_config.rms_norm_eps must be a number with a decimal point"),
        ({"text_config": {"hidden_act": "x"}}, "text_config.hidden_act must be one of gelu, "),
        ({"text_config": {"use_cache": None}}, "text_config.use_cache must be true or false, not null"),
        ({"vision_config": {"depth": "x"}}, "vision_config.depth must be an integer, not a string of 1 character"),
    ],
)
def test_a_part_of_a_configuration_is_checked_as_its_class_says(
    part: dict[str, dict[str, Any]], fault: str, tmp_path: Path
) -> None:
    config = CONFIG_MAPPING["qwen2_5_vl"]().to_dict()
    assert not refusal(tmp_path, config)
    changed = config | {key: config[key] | values for key, values in part.items()}
    assert refusal(tmp_path, changed).startswith(f"config.json: {fault}")


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"model_type": "x"}, 'model_type is "x", which this version of transformers does not know'),
        ({"dtype": "auto"}, 'dtype must be "bfloat16", "float16", .*, not "auto"'),
        ({"torch_dtype": "x"}, 'torch_dtype must be "bfloat16", .*, not "x"'),
        ({"hidden_act": "x"}, 'hidden_act must be one of gelu, .*, not "x"'),
        ({"rope_parameters": {"rope_type": "x"}}, 'rope_parameters.rope_type must be one of default, .*, not "x"'),
        ({"rope_scaling": {"type": "mrope"}}, 'rope_scaling.type must be one of default, .*, not "mrope"'),
        ({"layer_types": ["full_attention", "x"]}, r'layer_types\[1\] must be one of full_attention, .*, not "x"'),
        ({"layer_types": []}, "layer_types has 0 entries, but num_hidden_layers is 2"),
        ({"id2label": {"x": "x"}}, "id2label.x must be under a number"),
        ({"num_labels": 10**9}, "num_labels must be at most 1048576"),
        ({"per_layer_config": {"0": 5}}, "per_layer_config.0 must be an object, not 5"),
    ],
)
def test_an_unknown_name_is_refused_by_its_field(changed: dict[str, Any], fault: str, tmp_path: Path) -> None:
    config = CONFIG_MAPPING["llama"](**GROUPED).to_dict()
    assert re.match(f"config.json: {fault}", refusal(tmp_path, config | changed))


def test_all_names_that_transformers_has_are_accepted(tmp_path: Path) -> None:
    config = CONFIG_MAPPING["llama"](**GROUPED).to_dict()
    for name in ACT2CLS:
        assert not refusal(tmp_path, config | {"hidden_act": name})
    for name in ("default", *ROPE_INIT_FUNCTIONS):
        assert not refusal(tmp_path, config | {"rope_parameters": {"rope_type": name}})
    for name in CONFIG_MAPPING:
        assert not name_fault({"model_type": name})
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in get_args(WeightType))


def test_layers_that_differ_are_refused_with_the_number_in_which_they_do(tmp_path: Path) -> None:
    config = CONFIG_MAPPING["llama"](**GROUPED).to_dict()
    assert not refusal(tmp_path, config | {"per_layer_config": {"0": {"num_key_value_heads": 2}}})
    assert "per_layer_config gives layers different values of 'num_key_value_heads'" in late_refusal(tmp_path)


def test_neither_torch_nor_transformers_is_imported_for_it() -> None:
    code = (
        "import sys; from services.models.files.folder_check import declared_schema, name_fault; "
        "declared_schema({'model_type': 'llama'}); name_fault({'model_type': 'llama', 'hidden_act': 'silu'}); "
        "sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
