"""Dequantizes the folders of GPT-OSS, bitsandbytes and GGUF from their layouts, and shares no code with readers.

Everything is read at once, and numbers are unpacked one by one; those of GGUF are unpacked by the package gguf.
"""

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

METHODS = ("mxfp4", "bitsandbytes")
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# Quantiles of a normal distribution, and floats with a sign, two bits of exponent and one of mantissa, by size.
_NF4 = """-1.0 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 -0.18477343022823334
-0.09105003625154495 0.0 0.07958029955625534 0.16093020141124725 0.24611230194568634 0.33791524171829224
0.44070982933044434 0.5626170039176941 0.7229568362236023 1.0"""
_FP4 = (0, 0.0625, 8, 12, 4, 6, 2, 3)
_TABLES = {
    "nf4": torch.tensor([float(one) for one in _NF4.split()]),
    "fp4": torch.tensor([*_FP4, *(-one for one in _FP4)]) / torch.tensor(12.0),
}
_MODULES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}


def dequantized(folder: Path) -> dict[str, torch.Tensor]:
    """Return a folder's tensors under transformers' names, quantized ones in float32."""
    if parts := sorted(folder.glob("*.gguf")):
        return of_gguf(parts, json.loads((folder / "config.json").read_text()))
    stored = {name: one for path in sorted(folder.glob("*.safetensors")) for name, one in load_file(path).items()}
    declared = json.loads((folder / "config.json").read_text())["quantization_config"]
    return {"mxfp4": of_mxfp4, "bitsandbytes": of_bitsandbytes}[declared["quant_method"]](stored)


def of_mxfp4(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return GPT-OSS's tensors, of experts `[experts, inputs, outputs]`."""
    found = {}
    for name, one in stored.items():
        if name.endswith("_blocks"):
            powers = torch.exp2(stored[name.removesuffix("blocks") + "scales"].float() - 127)
            numbers = torch.tensor([[_E2M1[byte & 15], _E2M1[byte >> 4]] for byte in range(256)])[one.long()]
            found[name.removesuffix("_blocks")] = (numbers.flatten(-2) * powers[..., None]).flatten(2).mT.contiguous()
        elif not name.endswith("_scales"):
            found[name] = one
    return found


def of_bitsandbytes(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a model in int8, nf4 or fp4. Experts' matrices are one by one."""
    found = {}
    for name, one in stored.items():
        state = next((key for key in stored if key.startswith(f"{name}.quant_state.")), None)
        if state:
            found[name] = in_4_bits(name, stored, json.loads(bytes(stored[state].tolist())))
        elif scales := [stored[key] for key in (name.removesuffix("weight") + "SCB",) if key in stored and key != name]:
            found[name] = one.float() * (scales[0] / 127)[:, None]
        elif not re.search(r"\.(SCB|weight_format|absmax|quant_map|nested_\w+|quant_state\.\w+)$", name):
            found[name] = one
    return found


def in_4_bits(name: str, stored: dict[str, torch.Tensor], state: dict[str, Any]) -> torch.Tensor:
    """Return the values of a matrix, whose JSON text says `state`."""
    scales = stored[f"{name}.absmax"]
    if f"{name}.nested_absmax" in stored:
        blocks = torch.arange(len(scales)) // state["nested_blocksize"]
        scales = stored[f"{name}.nested_quant_map"][scales.long()] * stored[f"{name}.nested_absmax"][blocks]
        scales += torch.tensor(state["nested_offset"])
    data = stored[name].flatten().view(torch.uint8)
    codes = torch.tensor([half for byte in data.tolist() for half in (byte >> 4, byte & 15)])
    outputs, inputs = state["shape"]
    codes = codes[: outputs * inputs]
    return (_TABLES[state["quant_type"]][codes] * scales[torch.arange(len(codes)) // state["blocksize"]]).view(
        outputs, inputs
    )


def of_gguf(parts: list[Path], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a Llama, whose heads have rows in another order in the file."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    found = {}
    for tensor in (one for path in parts for one in gguf.GGUFReader(path).tensors):
        part = tensor.name.split(".")[-2]
        layer = re.match(r"blk\.(\d+)\.", tensor.name)
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if part in heads:
            halves = values.reshape(heads[part], -1, 2, values.shape[1])
            values = np.concatenate([halves[:, :, 0], halves[:, :, 1]], axis=1).reshape(values.shape)
        prefix = f"model.layers.{layer[1]}." if layer else ""
        found[f"{prefix}{_MODULES[part]}.weight"] = torch.from_numpy(np.array(values, np.float32))
    return found
