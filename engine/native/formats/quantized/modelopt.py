"""Weights as NVIDIA's ModelOpt stores them: floats of 8 bits, and NVFP4. It imports no torch.

The declaration is in hf_quant_config.json, or in config.json. Floats of 8 bits have one `weight_scale`, one for each
output, or one for each block [blocks, 1, blocks, 1]. NVFP4 has `weight` uint8 [outputs, inputs / 2], `weight_scale`
e4m3fn [outputs, inputs / 16] and `weight_scale_2`: a weight is e2m1 * scale * scale_2 (ModelOpt 0.47,
`torch/export/quant_utils.py`). Types of tensors say which modules have which, so `exclude_modules` is not needed.
"""

from collections.abc import Mapping
from typing import Any

from engine.errors import ModelUnsupported
from engine.native.formats.quantized.fields import check_no_cache
from engine.native.formats.quantized.float_codes import NamedPart, float4_codes
from engine.native.formats.quantized.fp8 import float8_matrix, float8_modules
from engine.native.formats.quantized.scheme import Coded, Matrices, by_module, unused
from engine.native.formats.tensors import TypedTensor

_MIXED = "MIXED_PRECISION"
_BLOCK = (128, 128)  # of FP8_PB_WO
_LABELS = {
    "FP8": "modelopt fp8",
    "FP8_PER_CHANNEL_PER_TOKEN": "modelopt fp8",
    "FP8_PB_WO": "modelopt fp8 128x128",
    "NVFP4": "modelopt nvfp4",
    "W4A16_NVFP4": "modelopt nvfp4",
    _MIXED: "modelopt mixed",
}
_WEIGHT, _SCALE, _OF_ALL = _PARTS = ("weight", "weight_scale", "weight_scale_2")
_SMOOTHED = "pre_quant_scale"  # of inputs


class ModelOpt:
    """A declaration of ModelOpt."""

    def __init__(self, label: str) -> None:
        """`label` names the format."""
        self.label = label

    def matrices(self, stored: Mapping[str, TypedTensor]) -> Matrices:
        """Return the quantized matrices of a folder. Raises ModelUnsupported, naming the tensor, as `Scheme`."""
        _check_not_smoothed(stored)
        parts = unused(stored)
        coded: dict[str, Coded] = {}
        packed = {module: one for module, one in by_module(stored, _PARTS).items() if _OF_ALL in one}
        for module, suffixes in packed.items():
            coded[f"{module}.{_WEIGHT}"] = _packed(module, suffixes, stored)
            parts.update(suffixes.values())
        for module, suffixes in float8_modules(stored).items():
            if module not in packed:
                coded[f"{module}.{_WEIGHT}"] = float8_matrix(module, suffixes, stored, _BLOCK)
                parts.update(suffixes.values())
        return Matrices(coded, frozenset(parts))


def modelopt(fields: Mapping[str, Any]) -> ModelOpt:
    """Return the scheme of a declaration. Raises ModelUnsupported, naming the field, for what is not served."""
    nested = fields.get("quantization")
    declared: Mapping[str, Any] = nested if isinstance(nested, dict) else fields
    check_no_cache(declared, "kv_cache_quant_algo", "kv_cache_scheme")
    algorithm = _served(declared.get("quant_algo"))
    layers = declared.get("quantized_layers")
    if algorithm == _MIXED and isinstance(layers, dict):
        for layer in layers.values():
            _served(layer.get("quant_algo") if isinstance(layer, dict) else layer)
    return ModelOpt(_LABELS[algorithm])


def _served(algorithm: Any) -> str:
    if isinstance(algorithm, str) and algorithm.upper() in _LABELS:
        return algorithm.upper()
    raise ModelUnsupported(
        f"its weights are quantized (modelopt, quant_algo {algorithm}), which is not served: use a checkpoint in FP8 "
        "or NVFP4, a GGUF file, such as Q4_K_M, or one in bfloat16, on CPUs with --weights int8 or int4"
    )


def _check_not_smoothed(stored: Mapping[str, TypedTensor]) -> None:
    for name in stored:
        if name.rpartition(".")[2] == _SMOOTHED:
            raise ModelUnsupported(f"its tensor {name} scales inputs before they are multiplied, which is not served")


def _packed(module: str, parts: Mapping[str, str], stored: Mapping[str, TypedTensor]) -> Coded:
    for suffix in _PARTS:
        if suffix not in parts:
            raise ModelUnsupported(f"its files lack tensor {module}.{suffix}")
    codes, scales, of_all = (NamedPart(parts[suffix], stored[parts[suffix]]) for suffix in _PARTS)
    return Coded(float4_codes(codes, scales, of_all))
