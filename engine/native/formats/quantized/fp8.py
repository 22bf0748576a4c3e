"""Weights in floats of 8 bits: of DeepSeek-V3 and transformers (fp8), of AutoFP8 and vLLM, and of FBGEMM. No torch.

A weight is q * s; s is `weight_scale_inv` or `weight_scale`, in spite of the name the factor itself. It is for a block
of 128 outputs and 128 inputs, for an output, or for all (transformers 5.23: `integrations/finegrained_fp8.py`).
transformers keeps experts as `gate_up_proj` [experts, 2 * intermediate, hidden] and `down_proj`, with
`gate_up_proj_scale_inv` and `down_proj_scale_inv`. Modules without scales are as their files have them, so
`modules_to_not_convert` and `ignored_layers` are not needed; neither are scales of activations.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from engine.errors import ModelUnsupported
from engine.native.formats.quantized.fields import check_no_cache
from engine.native.formats.quantized.float_codes import FLOAT8, NamedPart, float8_codes
from engine.native.formats.quantized.scheme import Coded, Matrices, by_module, unused
from engine.native.formats.tensors import ExpertPlace, TypedTensor

_WEIGHT, _SCALES = "weight", ("weight_scale_inv", "weight_scale")
_EXPERTS = re.compile(r"(?P<experts>.+\.mlp\.experts)\.gate_up_proj")
_DEFAULT_BLOCK = (128, 128)
_DIMENSIONS = 3  # of a tensor of all experts

Block = tuple[int, int] | None


class Float8Scheme:
    """A declaration of floats of 8 bits."""

    def __init__(self, label: str, block: Block) -> None:
        """`block` are outputs and inputs with a scale, where scales are not for an output or for all."""
        self.label, self._block = label, block

    def matrices(self, stored: Mapping[str, TypedTensor]) -> Matrices:
        """Return the quantized matrices of a folder. Raises ModelUnsupported, naming the tensor, as `Scheme`."""
        parts = unused(stored)
        coded: dict[str, Coded] = {}
        for module, suffixes in float8_modules(stored).items():
            coded[f"{module}.{_WEIGHT}"] = float8_matrix(module, suffixes, stored, self._block)
            parts.update(suffixes.values())
        for match in filter(None, map(_EXPERTS.fullmatch, stored)):
            if stored[match[0]].get_dtype() == FLOAT8:
                experts = _Experts(match["experts"], stored, self._block)
                coded |= experts.matrices()
                parts |= experts.parts
        return Matrices(coded, frozenset(parts))


def fp8(fields: Mapping[str, Any]) -> Float8Scheme:
    """Return the scheme of `fp8`. Raises ModelUnsupported, naming the field, for what is not served."""
    check_no_cache(fields, "kv_cache_scheme", "kv_cache_quant_method")
    if (experts := fields.get("expert_dtype") or "fp8") != "fp8":
        raise ModelUnsupported(
            f"its weights are quantized (fp8), with expert_dtype {experts}, which is not served: use a GGUF file"
        )
    block = _declared_block(fields.get("weight_block_size", _DEFAULT_BLOCK))
    label = f"fp8 {block[0]}x{block[1]}" if block and fields.get("weight_block_size") else "fp8"
    return Float8Scheme(label, block)


def fbgemm_fp8(_fields: Mapping[str, Any]) -> Float8Scheme:
    """Return the scheme of `fbgemm_fp8`: a scale for each output."""
    return Float8Scheme("fbgemm fp8", None)


def _declared_block(declared: Any) -> Block:
    if declared is None:
        return None
    if isinstance(declared, list | tuple) and [type(one) for one in declared] == [int, int] and min(declared) > 0:
        return declared[0], declared[1]
    raise ModelUnsupported(f"its quantization has weight_block_size {declared!r}, which are no outputs and inputs")


def float8_modules(stored: Mapping[str, TypedTensor]) -> dict[str, dict[str, str]]:
    """Return the parts of modules that have weights of this type, or scales, by suffix."""
    return {
        module: parts
        for module, parts in by_module(stored, (_WEIGHT, *_SCALES)).items()
        if set(parts) != {_WEIGHT} or stored[parts[_WEIGHT]].get_dtype() == FLOAT8
    }


def float8_matrix(module: str, parts: Mapping[str, str], stored: Mapping[str, TypedTensor], block: Block) -> Coded:
    """Return the matrix of a module. Raises ModelUnsupported, naming the tensor, if a part does not fit."""
    scales = next((parts[one] for one in _SCALES if one in parts), "")
    if not scales or _WEIGHT not in parts:
        missing = f"{module}.{_WEIGHT}" if scales else f"{module}.{_SCALES[0]} or {module}.{_SCALES[1]}"
        raise ModelUnsupported(f"its files lack tensor {missing}")
    weight = NamedPart(parts[_WEIGHT], stored[parts[_WEIGHT]])
    return Coded(float8_codes(weight, NamedPart(scales, stored[scales]), block))


class _Experts:
    """The matrices of a layer's experts, of which files have those of all as one tensor."""

    def __init__(self, experts: str, stored: Mapping[str, TypedTensor], block: Block) -> None:
        self._experts, self._stored = experts, stored
        self._names = [f"{experts}.{one}{of}" for one in ("gate_up_proj", "down_proj") for of in ("", "_scale_inv")]
        self.parts = frozenset(self._names)
        self._count = self._checked_count()
        self._transposed = self._is_transposed()
        self._block = block[::-1] if block and self._transposed else block  # of the tensors

    def matrices(self) -> dict[str, Coded]:
        """Return them under the names that Qwen3-MoE's files have for the matrices of each expert."""
        return dict(one for expert in range(self._count) for one in self._of(expert))

    def _checked_count(self) -> int:
        counts = []
        for name in self._names:
            if name not in self._stored:
                raise ModelUnsupported(f"its files lack tensor {name}")
            shape = self._stored[name].get_shape()
            counts.append(shape[0] if len(shape) == _DIMENSIONS and all(shape) else 0)
            if not counts[-1] or counts[-1] != counts[0]:
                raise ModelUnsupported(f"its tensor {name} has shape {list(shape)}, which does not fit its experts")
        return counts[0]

    def _is_transposed(self) -> bool:
        """Return whether the tensors are [experts, inputs, outputs]. Raises ModelUnsupported if they do not fit."""
        for transposed in (False, True):
            gates, _, down, _ = (one.shape for one in self._named(0, transposed=transposed))
            if gates == (2 * down[1], down[0]):
                return transposed
        raise ModelUnsupported(f"its tensor {self._names[2]} does not fit {self._names[0]}")

    def _named(self, expert: int, *, transposed: bool) -> list[NamedPart]:
        return [NamedPart(name, self._stored[name], expert, transposed) for name in self._names]

    def _of(self, expert: int) -> Iterator[tuple[str, Coded]]:
        gates, gate_scales, down, down_scales = self._named(expert, transposed=self._transposed)
        hidden, inner = down.shape
        for part, weight, scales, outputs in (
            ("gate", gates, gate_scales, range(inner)),
            ("up", gates, gate_scales, range(inner, 2 * inner)),
            ("down", down, down_scales, range(hidden)),
        ):
            block = self._block if part == "down" else self._of_halves(scales, inner, hidden)
            place = ExpertPlace(expert, outputs, self._transposed)
            yield (
                f"{self._experts}.{expert}.{part}_proj.weight",
                Coded(float8_codes(weight, scales, block, outputs), place),
            )

    def _of_halves(self, scales: NamedPart, inner: int, hidden: int) -> Block:
        """Return the block of gates and ups. transformers gives each half a scale of its own at least."""
        if scales.shape[0] == 2 and (self._block is None or self._block[0] >= 2 * inner):
            return inner, self._block[1] if self._block else hidden
        return self._block
