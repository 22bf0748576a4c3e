"""Writes the folders `fp8-*`: tiny checkpoints whose matrices transformers' own operations quantize and dequantize.

Run it with the versions in README.md: `python write_fp8.py`. `dequantized.json` is as in write_compressed.py. Matrices
of experts are there by the names that they have one by one, also where a file has those of all as one tensor.
"""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import FineGrainedFP8Config, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from write_digests import digest

HERE = Path(__file__).parent
_BLOCKS = {"fp8-blocks": (32, 64), "fp8-tensor": None, "fp8-experts": (32, 32), "fp8-stacked-experts": (16, 32)}
_COMMON: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "tie_word_embeddings": True,
}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
_MATRIX = re.compile(r".*(self_attn\.._proj|mlp\.\w+_proj|experts\.\d+\.\w+)\.weight|.*experts\.(gate_up|down)_proj")


def dense_model(name: str) -> Any:
    """Return the model before it is quantized."""
    torch.manual_seed(53)
    if "experts" in name:
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_COMMON, **_EXPERTS)).to(torch.bfloat16)
    return LlamaForCausalLM(LlamaConfig(**_COMMON)).to(torch.bfloat16)


def matrices(name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the matrices of a tensor, one by one."""
    if values.ndim == 2:
        return {name: values}
    experts, _, part = name.rpartition(".")
    found = {}
    for number, one in enumerate(values):
        halves = dict(zip(("gate", "up"), one.chunk(2), strict=True)) if part == "gate_up_proj" else {"down": one}
        found |= {f"{experts}.{number}.{key}_proj.weight": half for key, half in halves.items()}
    return found


def write(name: str) -> None:
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    declared = FineGrainedFP8Config(
        weight_block_size=_BLOCKS[name],
        modules_to_not_convert=["lm_head", *(f"model.layers.{one}.mlp.gate" for one in range(2) if "experts" in name)],
        scale_fmt="ue8m0" if name == "fp8-experts" else "float",
    )
    model = dense_model(name)
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    dense = dict(model.state_dict()) if name == "fp8-stacked-experts" else load_file(path)
    dense.pop("lm_head.weight", None)  # it is the embedding
    quantizer = SimpleNamespace(quantization_config=declared)
    stored, digests = {}, {}
    for key, one in dense.items():
        converted = Fp8Quantize(quantizer).convert({key: one}) if _MATRIX.fullmatch(key) else {key: one}
        stored |= {place: part.contiguous() for place, part in converted.items()}
        if len(converted) == 2:
            values = Fp8Dequantize(quantizer)._dequantize_one(*converted.values(), torch.float32)
            digests |= {place: digest(part) for place, part in matrices(key, values).items()}
    save_file(stored, path, {"format": "pt"})
    configuration = json.loads((folder / "config.json").read_text())
    configuration["quantization_config"] = declared.to_dict()
    (folder / "config.json").write_text(json.dumps(configuration, indent=2) + "\n")
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "dequantized.json").write_text(json.dumps(digests, indent=1) + "\n")


if __name__ == "__main__":
    for one in _BLOCKS:
        write(one)
