"""Writes tiny checkpoints in GPTQ and AWQ, always the same, as their libraries write them.

Those in `tests/data/quantized` are written by `python -m tests.engine.native.formats.quantized.write_checkpoints`.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING

from tests.engine.native.formats.quantized.writers import Floats, Written, write_awq, write_gptq
from tests.model_types.sizes import CONTEXT, SIZES, TIED, UNTIED

FOLDER = Path(__file__).parents[4] / "data" / "quantized"
_SPREAD = 0.3  # of weights; wide ones make greedy choices clear
_FIELDS = ("vocab_size", "bos_token_id", "eos_token_id", "num_attention_heads", "num_key_value_heads", "head_dim")
_MODEL: dict[str, Any] = {name: SIZES[name] for name in _FIELDS} | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "max_position_embeddings": CONTEXT,
}

Shapes = dict[str, tuple[int, ...]]


class Case(NamedTuple):
    """A checkpoint: `quantize` returns a module's parts, None where it is not quantized.

    `declaration` is in `declared_in`, or is the field quantization_config of config.json. With `zero_biases`, quantized
    modules have biases, which are 0, as AutoGPTQ wrote them.
    """

    model_type: str
    config: dict[str, Any]
    quantize: Callable[[str, Floats], Written | None]
    declaration: dict[str, Any]
    declared_in: str = "config.json"
    dtype: torch.dtype = torch.float16
    zero_biases: bool = False


def _ordered(module: str, weights: Floats) -> Written:
    """Quantize with the order that modules share which multiply the same rows."""
    layer, _, part = module.removesuffix("_proj").rpartition(".")
    inputs = f"{layer}.{next(one for one in ('qkv', 'o', 'gate up', 'down') if part in one)}"
    order = np.random.default_rng(crc32(inputs.encode())).permutation(weights.shape[1])
    return write_gptq(weights, 4, 64, version=2, sym=False, order=order, dtype=torch.bfloat16)


def _eight_bits(module: str, weights: Floats) -> Written | None:
    if module == "model.layers.0.mlp.down_proj":
        return None
    return write_gptq(weights, 4, 32) if module.endswith("k_proj") else write_gptq(weights, 8, 64)


def _all_but_head(write: Callable[[Floats], Written]) -> Callable[[str, Floats], Written | None]:
    return lambda module, weights: None if module == "lm_head" else write(weights)


COMMITTED = {
    "gptq-v1-sym-g32": Case(
        "llama",
        _MODEL | UNTIED,
        _all_but_head(lambda weights: write_gptq(weights, 4, 32)),
        {
            "bits": 4,
            "group_size": 32,
            "damp_percent": 0.01,
            "desc_act": False,
            "static_groups": False,
            "sym": True,
            "true_sequential": True,
            "model_name_or_path": None,
            "model_file_base_name": "model",
        },
        declared_in="quantize_config.json",
        zero_biases=True,
    ),
    "gptq-v2-asym-g64-act-order": Case(
        "llama",
        _MODEL | TIED | {"hidden_size": 128},
        _ordered,
        {
            "bits": 4,
            "group_size": 64,
            "desc_act": True,
            "sym": False,
            "lm_head": False,
            "dynamic": None,
            "quant_method": "gptq",
            "method": "gptq",
            "checkpoint_format": "gptq_v2",
            "format": "gptq_v2",
            "pack_dtype": "int32",
            "meta": {"quantizer": ["gptqmodel:4.0.0"], "true_sequential": True},
        },
        dtype=torch.bfloat16,
    ),
    "gptq-8-bit": Case(
        "qwen2",
        _MODEL | UNTIED,
        _eight_bits,
        {
            "bits": 8,
            "group_size": 64,
            "desc_act": False,
            "sym": True,
            "lm_head": True,
            "dynamic": {
                r"-:model\.layers\.0\.mlp\.down_proj": {},
                r"+:.*\.k_proj": {"bits": 4, "group_size": 32},
            },
            "quant_method": "gptq",
            "checkpoint_format": "gptq",
        },
    ),
    "awq-g64": Case(
        "llama",
        _MODEL | TIED | {"hidden_size": 128},
        _all_but_head(lambda weights: write_awq(weights, 64)),
        {
            "bits": 4,
            "group_size": 64,
            "modules_to_not_convert": None,
            "quant_method": "awq",
            "version": "gemm",
            "zero_point": True,
        },
    ),
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
OTHERS = {
    "auto-round-experts": Case(
        "qwen3_moe",
        _MODEL | UNTIED | EXPERTS,
        lambda module, weights: None if module.endswith((".gate", "lm_head")) else write_gptq(weights, 4, 32),
        {
            "bits": 4,
            "group_size": 32,
            "sym": True,
            "data_type": "int",
            "quant_method": "auto-round",
            "packing_format": "auto_round:auto_gptq",
            "block_name_to_quantize": "model.layers",
            "extra_config": {r".*mlp\.gate$": {"bits": 16}},
        },
    ),
}
CASES = COMMITTED | OTHERS


def write(name: str, folder: Path) -> Path:
    """Write the checkpoint of a case, and return its folder."""
    case = CASES[name]
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for tensor, values in _tensors(case):
        module = tensor.removesuffix(".weight")
        parts = _quantized(case, tensor, values)
        if parts is None:
            tensors[tensor] = values.to(case.dtype)
            continue
        tensors |= {f"{module}.{suffix}": one for suffix, one in parts.parts.items()}
        if case.zero_biases:
            tensors[f"{module}.bias"] = torch.zeros(len(values), dtype=case.dtype)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    declared = {"quantization_config": case.declaration} if case.declared_in == "config.json" else {}
    _write_json(folder / "config.json", _configuration(case) | declared)
    if not declared:
        _write_json(folder / case.declared_in, case.declaration)
    return folder


def write_dense(name: str, folder: Path) -> Path:
    """Write the values of a case's weights as an ordinary checkpoint in float32, and return its folder."""
    case = CASES[name]
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for tensor, values in _tensors(case):
        parts = _quantized(case, tensor, values)
        tensors[tensor] = values.to(case.dtype).float() if parts is None else torch.from_numpy(parts.values)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    _write_json(folder / "config.json", _configuration(case))
    return folder


def _quantized(case: Case, tensor: str, values: torch.Tensor) -> Written | None:
    module, _, suffix = tensor.rpartition(".")
    if suffix != "weight" or values.ndim != 2 or "embed" in module:
        return None
    return case.quantize(module, values.numpy())


def _configuration(case: Case) -> dict[str, Any]:
    config = CONFIG_MAPPING[case.model_type](**case.config, dtype=str(case.dtype).removeprefix("torch."))
    architectures = {"llama": "Llama", "qwen2": "Qwen2", "qwen3_moe": "Qwen3Moe"}
    written: dict[str, Any] = config.to_diff_dict() | {
        "architectures": [f"{architectures[case.model_type]}ForCausalLM"]
    }
    return {name: one for name, one in written.items() if name != "transformers_version"}


def _tensors(case: Case) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor of a case, in float32: random ones, each of its own seed."""
    for name, shape in _shapes(case).items():
        random = np.random.default_rng(crc32(name.encode()))
        values = torch.from_numpy(random.standard_normal(shape, dtype=np.float32) * np.float32(_SPREAD))
        yield name, 1 + values if name.endswith("norm.weight") else values


def _shapes(case: Case) -> Shapes:
    sizes = case.config
    hidden = sizes["hidden_size"]
    found: Shapes = {"model.embed_tokens.weight": (sizes["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not sizes["tie_word_embeddings"]:
        found["lm_head.weight"] = (sizes["vocab_size"], hidden)
    for number in range(sizes["num_hidden_layers"]):
        layer = _attention(case) | {f"{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
        experts = sizes.get("num_experts")
        if experts:
            layer["mlp.gate"] = (experts, hidden)
            for expert in range(experts):
                layer |= _gated(f"mlp.experts.{expert}", hidden, sizes["moe_intermediate_size"])
        else:
            layer |= _gated("mlp", hidden, sizes["intermediate_size"])
        for name, shape in layer.items():
            found[f"model.layers.{number}.{name}{'' if name.endswith('.bias') else '.weight'}"] = shape
    return found


def _attention(case: Case) -> Shapes:
    size, hidden = case.config["head_dim"], case.config["hidden_size"]
    queries, keys = size * case.config["num_attention_heads"], size * case.config["num_key_value_heads"]
    outputs = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    found: Shapes = {f"self_attn.{name}": (one, hidden) for name, one in outputs.items()}
    found["self_attn.o_proj"] = (hidden, queries)
    if case.model_type == "qwen2":
        found |= {f"self_attn.{name}.bias": (one,) for name, one in outputs.items()}
    if case.model_type == "qwen3_moe":
        found |= {f"self_attn.{name}_norm": (size,) for name in "qk"}
    return found


def _gated(mlp: str, hidden: int, inner: int) -> Shapes:
    return {f"{mlp}.gate_proj": (inner, hidden), f"{mlp}.up_proj": (inner, hidden), f"{mlp}.down_proj": (hidden, inner)}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    for name in COMMITTED:
        write(name, FOLDER / name)
