"""What a message says of a method that is not served: its name, with bits or type. It imports no torch."""

import re
from collections.abc import Mapping
from typing import Any

from engine.native.formats.quantized.declared import Declared

_BITS = ("bits", "w_bit", "wbits", "nbits", "num_bits")
_TYPES = ("weights", "quant_type", "weight_dtype", "forward_dtype", "dtype", "_type")
# Objects in which some have them: of HQQ, and of torchao.
_INSIDE = ("quant_config", "weight_quant_params", "quant_type", "default")
_MOST_BITS = 64
_WORD = re.compile(r"[\w.-]{1,40}", re.ASCII)


def described(found: Declared) -> str:
    """Return the method of a declaration, such as `hqq, 4 bits`. The file's texts are given if they are short words."""
    name = found.method if _WORD.fullmatch(found.method) else "by a method with an unknown name"
    how = _how(found.fields)
    return f"{name}, {how}" if how else name


def _how(fields: Mapping[str, Any], depth: int = 0) -> str:
    for name in _BITS:
        bits = fields.get(name)
        if isinstance(bits, int | float) and not isinstance(bits, bool) and 0 < bits <= _MOST_BITS:
            return f"{bits:g} bits"
    for name in _TYPES:
        if isinstance(kind := fields.get(name), str) and _WORD.fullmatch(kind):
            return kind
    inside = (fields[name] for name in _INSIDE if isinstance(fields.get(name), dict)) if depth < len(_INSIDE) else ()
    return next((how for one in inside if (how := _how(one, depth + 1))), "")
