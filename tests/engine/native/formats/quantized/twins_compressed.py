"""Dequantizes the folders of compressed-tensors, FP8 and ModelOpt from their layouts, and shares no code with readers.

Everything is read at once, and numbers are unpacked bit by bit. Products are float32.
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

METHODS = ("compressed-tensors", "fp8", "fbgemm_fp8", "modelopt")
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_UNUSED = ("input_scale", "input_global_scale", "input_scale_ub", "activation_scale", "k_scale", "v_scale", "q_scale")


def declaration(folder: Path) -> dict[str, Any]:
    """Return the fields of a folder's declaration."""
    configuration: dict[str, Any] = json.loads((folder / "config.json").read_text())
    if "quantization_config" in configuration:
        return dict(configuration["quantization_config"])
    fields: dict[str, Any] = json.loads((folder / "hf_quant_config.json").read_text())
    return fields | {"quant_method": "modelopt"}


def dequantized(folder: Path) -> dict[str, torch.Tensor]:
    """Return a folder's tensors under dense names, quantized ones in float32."""
    fields = declaration(folder)
    stored = {name: one for path in sorted(folder.glob("*.safetensors")) for name, one in load_file(path).items()}
    stored = {name: one for name, one in stored.items() if name.rpartition(".")[2] not in _UNUSED}
    found: dict[str, torch.Tensor] = {}
    modules: dict[str, dict[str, torch.Tensor]] = {}
    for name, one in stored.items():
        module, _, suffix = name.rpartition(".")
        if suffix.startswith("weight"):
            modules.setdefault(module, {})[suffix] = one
        elif f"{name}_scale_inv" in stored:
            scales = stored[f"{name}_scale_inv"]
            found[name] = torch.stack([scaled(*pair, block_of(fields)) for pair in zip(one, scales, strict=True)])
        elif not suffix.endswith("_scale_inv"):
            found[name] = one
    return found | {f"{module}.weight": matrix(module, parts, fields) for module, parts in modules.items()}


def matrix(module: str, parts: dict[str, torch.Tensor], fields: dict[str, Any]) -> torch.Tensor:
    """Return the values of a module's parts, by suffix."""
    if set(parts) == {"weight"}:
        return parts["weight"]
    if fields["quant_method"] != "compressed-tensors":
        if "weight_scale_2" in parts:
            return fp4(parts["weight"], parts["weight_scale"], 16) * parts["weight_scale_2"]
        scales = parts["weight_scale_inv"] if "weight_scale_inv" in parts else parts["weight_scale"]
        return scaled(parts["weight"], scales, block_of(fields))
    weights = group_of(module, fields)
    if weights["type"] == "float" and weights["num_bits"] == 4:
        found = fp4(parts["weight_packed"], parts["weight_scale"], weights["group_size"])
        return found / parts["weight_global_scale"] if "weight_global_scale" in parts else found
    if weights["type"] == "float":
        size = weights.get("group_size")
        return scaled(parts["weight"], parts["weight_scale"], weights.get("block_structure") or (size and [1, size]))
    return integers(parts, weights["num_bits"], weights.get("group_size"))


def group_of(module: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the weights of the group that names a module, by name before others."""

    def rank(target: str) -> int:
        if target == module:
            return 0
        if target.startswith("re:"):
            return 1 if re.match(target[3:], module) else 3
        return 2 if target == "Linear" else 3

    ranked = [(rank(one), group) for group in fields["config_groups"].values() for one in group["targets"]]
    place, group = min(ranked, key=lambda pair: pair[0])
    assert place < 3, module
    return dict(group["weights"])


def block_of(fields: dict[str, Any]) -> list[int] | None:
    """Return the outputs and inputs that have a scale in common, if a declaration says so."""
    if fields["quant_method"] == "modelopt":
        return [128, 128]
    return fields.get("weight_block_size")


def powers(scales: torch.Tensor) -> torch.Tensor:
    """Return scales in float32, of which bytes are exponents of two."""
    if scales.dtype == torch.uint8:
        return torch.tensor([2.0 ** (int(one) - 127) for one in scales.flatten()]).reshape(scales.shape)
    return scales.float()


def scaled(weight: torch.Tensor, scales: torch.Tensor, block: list[int] | None) -> torch.Tensor:
    """Return values times scales: of blocks, of outputs, or one for all."""
    outputs, inputs = weight.shape
    factors = powers(scales)
    if factors.ndim == 4:
        factors = factors[:, 0, :, 0]
    if factors.numel() == 1:
        return weight.float() * factors.flatten()[0]
    if block and factors.shape == (-(-outputs // block[0]), -(-inputs // block[1])):
        return weight.float() * torch.kron(factors, torch.ones(block[0], block[1]))[:outputs, :inputs]
    return weight.float() * factors.reshape(outputs, 1)


def fp4(packed: torch.Tensor, scales: torch.Tensor, group: int) -> torch.Tensor:
    """Return floats of 4 bits times scales of groups of inputs."""
    table = torch.tensor(_E2M1)
    found = torch.empty(packed.shape[0], 2 * packed.shape[1])
    found[:, 0::2] = table[(packed % 16).long()]
    found[:, 1::2] = table[(packed // 16).long()]
    return found * powers(scales).repeat_interleave(group, 1)


def integers(parts: dict[str, torch.Tensor], bits: int, group: int | None) -> torch.Tensor:
    """Return integers less their zeros, times scales."""
    if "weight_packed" in parts:
        outputs, inputs = parts["weight_shape"].tolist()
        codes = unpacked(parts["weight_packed"], bits, inputs)
    else:
        codes = parts["weight"].long()
        outputs, inputs = codes.shape
    scales = parts["weight_scale"].float()
    zeros = parts.get("weight_zero_point", torch.zeros(1, 1, dtype=torch.int8))
    if zeros.dtype == torch.int32:
        zeros = unpacked(zeros.T, bits, outputs).T
    of_inputs = torch.arange(inputs) // (group or inputs)
    if "weight_g_idx" in parts:
        of_inputs = parts["weight_g_idx"].long()
    groups = inputs // (group or inputs)
    scales, zeros = (one.reshape(-1, one.shape[-1]).expand(outputs, groups) for one in (scales, zeros))
    return (codes - zeros[:, of_inputs].long()).float() * scales[:, of_inputs]


def unpacked(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Return the signed numbers in rows of words of 32 bits, from the lowest bits on."""
    rows = []
    for row in words.tolist():
        number = sum((word % 2**32) << (32 * place) for place, word in enumerate(row))
        rows.append([((number >> (bits * one)) % 2**bits) - 2 ** (bits - 1) for one in range(count)])
    return torch.tensor(rows)
