"""Writes the folders `compressed-*`: tiny Llama checkpoints, quantized and saved by compressed-tensors.

Run it with the versions in README.md: `python write_compressed.py [NAME ...]`. `compressed-w4a16-act-order` needs
compressed-tensors 0.14, the last line of versions that writes `weight_g_idx`; all others are written by 0.20.1.

Beside each checkpoint, `dequantized.json` has the weights as the library itself dequantizes them: the digest of their
bfloat16 values, and their sum of squares.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM
from write_digests import digest

HERE = Path(__file__).parent
_PRESETS: dict[str, dict[str, Any]] = {
    "compressed-w4a16-g32": {"num_bits": 4, "strategy": "group", "group_size": 32},
    "compressed-w4a16-g64-asym": {"num_bits": 4, "strategy": "group", "group_size": 64, "symmetric": False},
    "compressed-w4a16-act-order": {"num_bits": 4, "strategy": "group", "group_size": 32, "actorder": "group"},
    "compressed-w4a16-channel-asym": {"num_bits": 4, "strategy": "channel", "symmetric": False},
    "compressed-w8a16-channel": {"num_bits": 8, "strategy": "channel"},
    "compressed-w8a16-g32-asym": {"num_bits": 8, "strategy": "group", "group_size": 32, "symmetric": False},
    "compressed-w8a8": {"num_bits": 8, "strategy": "channel"},
    "compressed-fp8-tensor": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "compressed-fp8-channel": {"num_bits": 8, "type": "float", "strategy": "channel"},
    "compressed-fp8-block": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
    "compressed-mxfp8": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "uint8"},
    "compressed-nvfp4": {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "scale_dtype": "float8_e4m3fn",
    },
    "compressed-mxfp4": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "uint8"},
}
_TOKENS: dict[str, Any] = {"num_bits": 8, "strategy": "token", "dynamic": True}
_ACTIVATIONS: dict[str, dict[str, Any]] = {
    "compressed-w8a8": {**_TOKENS, "type": "int"},
    "compressed-fp8-channel": {**_TOKENS, "type": "float"},
    "compressed-fp8-tensor": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "compressed-fp8-block": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True},
}
_MIXED = "compressed-mixed"
_UNTIED = ("compressed-w4a16-g32", "compressed-w8a8")  # their heads are no embeddings


def groups(name: str) -> dict[str, Any]:
    """Return the config_groups of a folder."""
    if name == _MIXED:
        attention = {"targets": ["re:.*self_attn.*"], "weights": _PRESETS["compressed-fp8-channel"]}
        attention["input_activations"] = {**_TOKENS, "type": "float"}
        others = {"targets": ["Linear"], "weights": _PRESETS["compressed-w4a16-g32"]}
        first = {"targets": ["model.layers.0.mlp.down_proj"], "weights": _PRESETS["compressed-w8a16-channel"]}
        return {"group_0": attention, "group_1": others, "group_2": first}
    found = {"targets": ["Linear"], "weights": _PRESETS[name]}
    if name in _ACTIVATIONS:
        found["input_activations"] = _ACTIVATIONS[name]
    return {"group_0": found}


def dense_model(name: str) -> Any:
    """Return the model before it is quantized. Of blocks of 128, the last of a side is smaller."""
    torch.manual_seed(53)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=300,
            hidden_size=64,
            intermediate_size=160 if name == "compressed-fp8-block" else 128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            initializer_range=0.3,
            bos_token_id=1,
            eos_token_id=0,
            tie_word_embeddings=name not in _UNTIED,
        )
    ).to(torch.bfloat16)


def extremes(weight: torch.Tensor, args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the least and the largest weights that have a scale in common."""
    if args.strategy in ("group", "tensor_group"):
        parts = weight.unflatten(1, (-1, args.group_size))
        return parts.amin(-1), parts.amax(-1)
    if args.strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if args.strategy == "block":
        rows, columns = args.block_structure
        blocks = [list(row.split(columns, 1)) for row in weight.split(rows, 0)]
        lows, highs = ([[float(getattr(one, of)()) for one in row] for row in blocks] for of in ("min", "max"))
        return torch.tensor(lows), torch.tensor(highs)
    return weight.min().reshape(1), weight.max().reshape(1)


def order_of(name: str, inputs: int) -> torch.Tensor:
    """Return an order of inputs, which modules that multiply the same rows share, as calibrations do."""
    parent, _, kind = name.rpartition(".")
    rows = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}.get(kind, kind)
    return torch.randperm(inputs, generator=torch.Generator().manual_seed(crc32(f"{parent}.{rows}".encode())))


def set_scales(name: str, module: Any) -> None:
    """Set a linear module's scales and zeros, as a calibration by the largest weight does."""
    args = module.quantization_scheme.weights
    weight = module.weight.data.float()
    if getattr(args, "actorder", None) == "group":
        order = order_of(name, weight.shape[1])
        groups_of = torch.empty_like(order)
        groups_of[order] = torch.arange(len(order)) // args.group_size
        module.weight_g_idx.data.copy_(groups_of)
        weight = weight[:, torch.argsort(groups_of, stable=True)]
    of_all = None
    if hasattr(module, "weight_global_scale"):
        of_all = generate_gparam(weight.min(), weight.max())
        module.weight_global_scale.data.copy_(of_all)
    scale, zero = calculate_qparams(*extremes(weight, args), args, global_scale=of_all)
    module.weight_scale.data.copy_(scale)
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data.copy_(zero)
    if hasattr(module, "input_scale"):
        module.input_scale.data.fill_(0.0625)


def write(name: str) -> None:
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    model = dense_model(name)
    declared = {"config_groups": groups(name), "ignore": ["lm_head"], "quantization_status": "initialized"}
    apply_quantization_config(model, QuantizationConfig.model_validate(declared))
    quantized = {key: one for key, one in model.named_modules() if hasattr(one, "quantization_scheme")}
    for key, one in quantized.items():
        set_scales(key, one)
        one.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.config.dtype = torch.bfloat16
    model.save_pretrained(folder)
    compressor.update_config(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    path = folder / "model.safetensors"
    save_file({key: one.contiguous() for key, one in load_file(path).items()}, path, {"format": "pt"})
    compressor.decompress_model(model)
    found = {f"{key}.weight": digest(one.weight.data) for key, one in quantized.items()}
    (folder / "dequantized.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    for one in sys.argv[1:] or [*(set(_PRESETS) - {"compressed-w4a16-act-order"}), _MIXED]:
        write(one)
