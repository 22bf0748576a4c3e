"""Writes the folders `bitsandbytes-*`: tiny checkpoints whose matrices bitsandbytes quantizes and dequantizes.

Run it with the versions in README.md: `python write_bitsandbytes.py`. Tensors are those that bitsandbytes' own modules
save. `dequantized.json` is as in write_compressed.py.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bitsandbytes import nn
from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
from bitsandbytes.functional import dequantize_blockwise, int8_vectorwise_dequant
from safetensors.torch import load_file, save_file
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from write_digests import digest

HERE = Path(__file__).parent
_COMMON: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
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
_4_BITS = {"load_in_4bit": True, "bnb_4bit_compute_dtype": "bfloat16"}
FOLDERS: dict[str, dict[str, Any]] = {
    "bitsandbytes-int8": {"load_in_8bit": True, "llm_int8_skip_modules": ["lm_head", "down_proj"]},
    "bitsandbytes-int8-experts": {"load_in_8bit": True},
    "bitsandbytes-nf4": _4_BITS | {"bnb_4bit_quant_type": "nf4"},
    "bitsandbytes-nf4-double": _4_BITS | {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "bitsandbytes-nf4-bfloat16": _4_BITS | {"bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": "bfloat16"},
    "bitsandbytes-fp4": _4_BITS | {"bnb_4bit_quant_type": "fp4"},
}
_MATRIX = re.compile(r".*(self_attn\.._proj|mlp\.\w+_proj|experts\.\d+\.\w+)\.weight")


def dense_model(name: str) -> Any:
    """Return the model before it is quantized. Its rows are not whole blocks of 64 where its sizes allow it."""
    torch.manual_seed(53)
    if "experts" in name:
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_COMMON, intermediate_size=128, **_EXPERTS)).to(torch.bfloat16)
    return LlamaForCausalLM(LlamaConfig(**_COMMON, intermediate_size=96)).to(torch.bfloat16)


def in_8_bits(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return what a module saves, and the values."""
    module = nn.Linear8bitLt(weight.shape[1], weight.shape[0], bias=False, has_fp16_weights=False)
    module.weight = nn.Int8Params(weight.to(torch.float16), requires_grad=False, has_fp16_weights=False)
    module.to("cpu")
    module.weight = module.weight._quantize("cpu") if module.weight.dtype != torch.int8 else module.weight
    saved = module.state_dict()
    return saved, int8_vectorwise_dequant(saved["weight"], saved["SCB"])


def in_4_bits(declared: dict[str, Any]) -> Callable[[torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]]:
    """Return a function that returns what a module saves, and the values in the type of its weight."""

    def quantize(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        module = nn.Linear4bit(weight.shape[1], weight.shape[0], bias=False)
        module.weight = nn.Params4bit(
            weight,
            requires_grad=False,
            quant_type=declared["bnb_4bit_quant_type"],
            compress_statistics=declared.get("bnb_4bit_use_double_quant", False),
            quant_storage=getattr(torch, declared.get("bnb_4bit_quant_storage", "uint8")),
        )
        module.weight = module.weight._quantize("cpu")
        return module.state_dict(), values_of(module.weight)

    return quantize


def values_of(weight: nn.Params4bit) -> torch.Tensor:
    """Return the values by bitsandbytes' own reference: its kernel for CPUs takes blocks to end with a row."""
    state = weight.quant_state
    scales = dequantize_blockwise(state.absmax, state.state2) + state.offset if state.nested else state.absmax
    codes = weight.data.view(-1).view(torch.uint8)
    return _dequantize_4bit_compute.__wrapped__(codes, scales, state.code, state.blocksize, state.shape, state.dtype)


def write(name: str) -> None:
    folder, declared = HERE / name, FOLDERS[name]
    shutil.rmtree(folder, ignore_errors=True)
    dense_model(name).save_pretrained(folder)
    path, digests = folder / "model.safetensors", {}
    dense, stored = load_file(path), {}
    dense.pop("lm_head.weight", None)  # it is the embedding
    quantize = in_8_bits if "load_in_8bit" in declared else in_4_bits(declared)
    skipped = tuple(declared.get("llm_int8_skip_modules", ()))
    for key, one in dense.items():
        module = key.removesuffix(".weight")
        if not _MATRIX.fullmatch(key) or module.endswith(skipped or ("-",)):
            stored[key] = one
            continue
        saved, values = quantize(one)
        stored |= {f"{module}.{suffix}": part.contiguous().clone() for suffix, part in saved.items()}
        digests[key] = digest(values)
    save_file(stored, path, {"format": "pt"})
    configuration = json.loads((folder / "config.json").read_text())
    configuration["quantization_config"] = BitsAndBytesConfig(**declared).to_dict()
    (folder / "config.json").write_text(json.dumps(configuration, indent=2) + "\n")
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "dequantized.json").write_text(json.dumps(digests, indent=1) + "\n")


if __name__ == "__main__":
    for one in FOLDERS:
        write(one)
