"""Declarations of bitsandbytes. Tensors say what is quantized, so lists of skipped modules are not needed. No torch."""

from collections.abc import Mapping
from typing import Any

from engine.errors import ModelUnsupported
from engine.native.formats.quantized.bitsandbytes.float4 import TABLES, Bnb4Scheme
from engine.native.formats.quantized.bitsandbytes.int8 import Bnb8Scheme
from engine.native.formats.quantized.fields import flag, names
from engine.native.formats.quantized.scheme import HELP, Scheme


def bitsandbytes(fields: Mapping[str, Any]) -> Scheme:
    """Return the scheme of `bitsandbytes`. Raises ModelUnsupported, naming the field, for what is not served."""
    names(fields, "llm_int8_skip_modules")
    in_8_bits, in_4_bits = (flag(fields, f"load_in_{bits}bit", default=False) for bits in (8, 4))
    if in_8_bits == in_4_bits:
        said = "both" if in_4_bits else "neither"
        raise ModelUnsupported(f"its quantization (bitsandbytes) has {said} of load_in_8bit and load_in_4bit")
    if in_8_bits:
        return Bnb8Scheme()
    kind = fields.get("bnb_4bit_quant_type") or "fp4"  # the default of transformers
    if not isinstance(kind, str) or kind not in TABLES:
        raise ModelUnsupported(f"its quantization has bnb_4bit_quant_type {kind!r}, not nf4 or fp4: {HELP}")
    return Bnb4Scheme(kind)
