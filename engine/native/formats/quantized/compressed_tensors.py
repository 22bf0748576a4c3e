"""Weights as the library compressed-tensors stores them, also for llm-compressor and vLLM. It imports no torch.

Layouts are those of compressed-tensors 0.20.1, `compressors/`; `weight_g_idx` is that of 0.14. Only weights are read:
what is declared of activations, dynamic or static, is not used, because kernels quantize the activations of packed
weights by 32 inputs, which is finer than by token.
"""

from collections.abc import Mapping
from typing import Any

from engine.errors import ModelUnsupported
from engine.native.formats.quantized.compressed.groups import Targets, Weights, refused, weights_by_target
from engine.native.formats.quantized.compressed.integers import (
    ORDER,
    PACKED,
    PLAIN,
    SCALE,
    SHAPE,
    ZERO,
    compressed_integers,
)
from engine.native.formats.quantized.fields import check_no_cache, names
from engine.native.formats.quantized.float_codes import FLOATS, NamedPart, float4_codes, float8_codes
from engine.native.formats.quantized.scheme import Coded, Matrices, by_module, unused
from engine.native.formats.tensors import TypedTensor

_OF_ALL = "weight_global_scale"
_SUFFIXES = (PACKED, PLAIN, SCALE, ZERO, ORDER, SHAPE, _OF_ALL)
_MOST_KINDS = 4  # in a label
_STATES = ("compressed", "frozen")


class CompressedTensors:
    """A declaration of compressed-tensors."""

    def __init__(self, weights: Mapping[str, Weights], ignored: tuple[str, ...]) -> None:
        """`weights` are by target; `ignored` are targets too."""
        self._targets = Targets(weights, ignored)
        kinds = [*dict.fromkeys(one.label for one in weights.values())]
        more = [f"{len(kinds) - _MOST_KINDS} more"] if len(kinds) > _MOST_KINDS else []
        self.label = "compressed-tensors " + " + ".join(kinds[:_MOST_KINDS] + more)

    def matrices(self, stored: Mapping[str, TypedTensor]) -> Matrices:
        """Return the quantized matrices of a folder. Raises ModelUnsupported, naming the tensor, as `Scheme`."""
        modules = {
            module: parts for module, parts in by_module(stored, _SUFFIXES).items() if _is_quantized(parts, stored)
        }
        self._targets.check_count(len(modules))
        coded = {
            f"{module}.{PLAIN}": self._coded(module, {suffix: stored[name] for suffix, name in parts.items()})
            for module, parts in modules.items()
        }
        found = unused(stored).union(*(parts.values() for parts in modules.values()))
        return Matrices(coded, frozenset(found))

    def _coded(self, module: str, parts: Mapping[str, TypedTensor]) -> Coded:
        if PACKED in parts and PLAIN in parts:
            raise ModelUnsupported(f"its files have both tensor {module}.{PLAIN} and {module}.{PACKED}")
        for weight in (PACKED, PLAIN):
            if weight in parts:
                return _coded(module, weight, parts, self._weights(module, f"{module}.{weight}"))
        raise ModelUnsupported(f"its files lack tensor {module}.{PLAIN} or {module}.{PACKED}")

    def _weights(self, module: str, tensor: str) -> Weights:
        if self._targets.ignores(module):
            raise ModelUnsupported(f"its tensor {tensor} has quantized weights, but its quantization ignores {module}")
        found = self._targets.of(module)
        if found is None:
            raise ModelUnsupported(f"its tensor {tensor} has quantized weights, but no targets of its quantization fit")
        return found


def compressed_tensors(fields: Mapping[str, Any]) -> CompressedTensors:
    """Return the scheme of a declaration. Raises ModelUnsupported, naming the field, for what is not served."""
    nested = fields.get("quantization_config")
    if isinstance(nested, dict):  # as transformers saves it
        fields = {**fields, **nested}
    check_no_cache(fields, "kv_cache_scheme")
    _check_dense(fields.get("sparsity_config"))
    if fields.get("transform_config"):
        raise refused("transform_config: activations that are rotated before a product")
    if fields.get("moe_sparsity_config"):
        raise refused("moe_sparsity_config: experts that are pruned or constant")
    if (state := fields.get("quantization_status") or "compressed") not in _STATES:
        raise refused(f"quantization_status {state}", "save it compressed")
    return CompressedTensors(weights_by_target(fields), names(fields, "ignore"))


def _check_dense(sparsity: Any) -> None:
    form = sparsity.get("format") or "dense" if isinstance(sparsity, dict) else sparsity or "dense"
    if form != "dense":
        raise refused(f"sparsity_config with format {form}")


def _is_quantized(parts: Mapping[str, str], stored: Mapping[str, TypedTensor]) -> bool:
    return set(parts) != {PLAIN} or (
        stored[parts[PLAIN]].get_dtype() not in (*FLOATS, "F64") and len(stored[parts[PLAIN]].get_shape()) == 2
    )


def _coded(module: str, weight: str, parts: Mapping[str, TypedTensor], weights: Weights) -> Coded:
    if weights.kind == "int":
        if weight == PACKED and weights.bits not in (4, 8):
            raise refused(f"{weights.bits} bits in {module}.{PACKED}")
        return Coded(compressed_integers(module, parts, weights.bits, weights.size, symmetric=weights.symmetric))
    wanted = PACKED if weights.bits == 4 else PLAIN
    named = {suffix: _part(module, suffix, parts) for suffix in (wanted, SCALE)}
    if weights.bits == 4:
        of_all = _part(module, _OF_ALL, parts) if weights.size == 16 else None
        return Coded(float4_codes(named[PACKED], named[SCALE], of_all, divides=True))
    block = weights.block or ((1, weights.size) if weights.size else None)
    return Coded(float8_codes(named[PLAIN], named[SCALE], block))


def _part(module: str, suffix: str, parts: Mapping[str, TypedTensor]) -> NamedPart:
    name = f"{module}.{suffix}"
    if suffix not in parts:
        raise ModelUnsupported(f"its files lack tensor {name}")
    return NamedPart(name, parts[suffix])
