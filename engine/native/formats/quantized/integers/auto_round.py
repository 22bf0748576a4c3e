"""AutoRound, in its packing formats of GPTQ and AWQ. Others are refused by name.

`packing_format` auto_round:auto_gptq is GPTQ version 1, auto_round and auto_round:gptqmodel are version 2, and
auto_round:auto_awq is AWQ's version gemm (`auto_round/inference/backend.py`). `extra_config` has fields of single
modules, by name or by a pattern that a part of the name matches; 16 bits or more are not quantized.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from engine.errors import ModelUnsupported
from engine.native.formats.quantized.fields import integer
from engine.native.formats.quantized.integers import awq, gptq
from engine.native.formats.quantized.integers.layouts import Layout, Rule, Rules, layout_of
from engine.native.formats.quantized.scheme import Scheme, not_served

_METHOD = "auto-round"
_DENSE_BITS = 16
_PACKINGS: dict[str, tuple[Callable[[str, Rules], Scheme], tuple[int, ...]]] = {
    **dict.fromkeys(
        ("auto_round:auto_gptq", "auto_round:gptq", "auto_gptq"), (partial(gptq.gptq_scheme, version=1), gptq.BITS)
    ),
    **dict.fromkeys(("auto_round", "auto_round:gptqmodel"), (partial(gptq.gptq_scheme, version=2), gptq.BITS)),
    **dict.fromkeys(("auto_round:auto_awq", "auto_round:awq", "auto_awq"), (awq.awq_scheme, awq.BITS)),
}
# Fields of values that matrices of integers alone do not give.
_OTHERS = ("rotation_config", "super_bits", "super_group_size")


def auto_round(fields: Mapping[str, Any]) -> Scheme:
    """Return the scheme of a declaration. Raises ModelUnsupported, naming the field, if it is not served."""
    packing = fields.get("packing_format")
    if not isinstance(packing, str) or packing not in _PACKINGS:
        raise not_served(
            f"{_METHOD} in the packing format {packing}" if packing else f"{_METHOD} without packing_format"
        )
    for name in _OTHERS:
        if fields.get(name) is not None:
            raise not_served(f"{_METHOD} with {name}")
    _check_integers(fields)
    scheme, bits = _PACKINGS[packing]
    default = layout_of(fields, bits)
    return scheme(_METHOD, Rules(default, _rules(fields.get("extra_config"), default, bits), anywhere=True))


def _check_integers(fields: Mapping[str, Any]) -> None:
    """Raise ModelUnsupported unless weights are integers, and activations no codes."""
    if (kind := fields.get("data_type", "int")) != "int":
        raise not_served(f"{_METHOD} with the data type {kind}")
    if fields.get("act_bits") is not None and (bits := integer(fields, "act_bits")) < _DENSE_BITS:
        raise not_served(f"{_METHOD} with activations of {bits} bits")


def _rules(extra: Any, default: Layout, bits: tuple[int, ...]) -> list[Rule]:
    if extra is None:
        return []
    if not isinstance(extra, dict) or not all(isinstance(one, dict) for one in extra.values()):
        raise ModelUnsupported("its quantization has extra_config, which must map modules to objects")
    return [Rule(pattern, _layout(fields, default, bits)) for pattern, fields in extra.items() if fields]


def _layout(fields: Mapping[str, Any], default: Layout, bits: tuple[int, ...]) -> Layout | None:
    if integer(fields, "bits", default.bits) >= _DENSE_BITS:
        return None
    _check_integers(fields)
    return layout_of(fields, bits, default)
