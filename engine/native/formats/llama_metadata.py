"""Metadata of Llama-shaped GGUF files that change answers, but that neither the kernels nor transformers read.

llama.cpp obeys some of them. A file with another value than the usual one is refused: it would answer otherwise there.
"""

from math import isfinite
from typing import Any

from engine.errors import ModelUnsupported
from engine.native.formats.gguf_header import GgufHeader

# Values with which nothing changes.
_USUAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.scale": (0,),
    "attn_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "logit_scale": (0, 1),
    "rope.scale_linear": (0, 1),
    "rope.scaling.attn_factor": (0, 1),
}


def check_metadata(header: GgufHeader, head_size: int, vocabulary: int) -> None:
    """Raise ModelUnsupported, with the key, if one changes answers and is not read, or cannot be computed with."""
    usual = _USUAL | {"rope.dimension_count": (head_size,), "attention.value_length": (head_size,)}
    if f"{header.architecture}.rope.scaling.type" not in header.metadata:
        usual |= {"rope.scaling.factor": (1,)}  # which llama.cpp takes as linear
    for key, values in usual.items():
        found = header.metadata.get(f"{header.architecture}.{key}", values[0])
        if found not in values:
            raise ModelUnsupported(f"its {header.architecture}.{key} is {found}, but only {values[-1]} is served")
    window = header.number("attention.sliding_window") or 0
    if 0 < window < (header.number("context_length") or 0):
        key = f"{header.architecture}.attention.sliding_window"
        raise ModelUnsupported(f"its {key} is {window}, and windows are not read from GGUF files")
    for key in ("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.factor"):
        value = header.metadata.get(f"{header.architecture}.{key}", 1.0)
        if not (isinstance(value, int | float) and isfinite(value) and value > 0):
            raise ModelUnsupported(f"its {header.architecture}.{key} is {value}, not a number above 0")
    for key in ("bos", "eos"):
        token = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None and token not in range(vocabulary):
            raise ModelUnsupported(f"its tokenizer.ggml.{key}_token_id is {token}, but it has {vocabulary} tokens")
