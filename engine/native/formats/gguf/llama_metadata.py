"""Metadata of Llama-shaped GGUF files that change answers, but that neither the kernels nor transformers read.

llama.cpp obeys some of them. A file with another value than the usual one is refused: it would answer otherwise there.
"""

from math import isfinite
from typing import Any

from engine.errors import ModelUnsupported
from engine.native.formats.gguf.header import GgufHeader

# Factors of the frequencies that positions are rotated by; the folder's configuration has them (Llama 3.1).
ROTATION_FACTORS = "rope_freqs.weight"
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


def check_dense(header: GgufHeader) -> None:
    """Raise ModelUnsupported, with the key, if a file's layers are mixtures of experts."""
    for name in ("expert_count", "expert_used_count"):
        if found := header.number(name):
            raise ModelUnsupported(f"its {header.architecture}.{name} is {found}, but only 0 is served")


def check_metadata(header: GgufHeader, head_size: int, vocabulary: int) -> None:
    """Raise ModelUnsupported, with the key, if one changes answers and is not read, or cannot be computed with."""
    usual = _USUAL | {"rope.dimension_count": (head_size,), "attention.value_length": (head_size,)}
    if f"{header.architecture}.rope.scaling.type" not in header.metadata:
        usual |= {"rope.scaling.factor": (1,)}  # which llama.cpp takes as linear
    for name, values in usual.items():
        if (key := f"{header.architecture}.{name}") in header.metadata and header.metadata[key] not in values:
            raise ModelUnsupported(f"its {key} is {header.said(key)}, but only {values[-1]} is served")
    window = header.number("attention.sliding_window") or 0
    if 0 < window < (header.number("context_length") or 0):
        key = f"{header.architecture}.attention.sliding_window"
        raise ModelUnsupported(f"its {key} is {window}, and windows are not read from GGUF files")
    _check_numbers(header)
    _check_rotations(header)
    for role in ("bos", "eos", "padding"):
        key = f"tokenizer.ggml.{role}_token_id"
        if key in header.metadata and header.metadata[key] not in range(vocabulary):
            raise ModelUnsupported(f"its {key} is {header.said(key)}, but it has {vocabulary} tokens")


def _check_rotations(header: GgufHeader) -> None:
    """Raise ModelUnsupported, with the key, for scaled rotations that are not read, or that are scaled twice."""
    key, factor = (f"{header.architecture}.rope.scaling.{name}" for name in ("type", "factor"))
    scaling = header.metadata.get(key, "none")
    if scaling not in ("none", "linear"):
        raise ModelUnsupported(f"its {key} is {header.said(key)!r}, and such rotations are not read from GGUF files")
    if scaling == "linear" and ROTATION_FACTORS in header.tensors and header.metadata.get(factor, 1) != 1:
        raise ModelUnsupported(f"its {factor} is {header.said(factor)}, but only 1 is served with {ROTATION_FACTORS}")


def _check_numbers(header: GgufHeader) -> None:
    """Raise ModelUnsupported, with the key, for a number that is none, or not above 0."""
    if (epsilon := f"{header.architecture}.attention.layer_norm_rms_epsilon") not in header.metadata:
        raise ModelUnsupported(f"its metadata lacks a number above 0 as {epsilon}")
    for name in ("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.factor"):
        key = f"{header.architecture}.{name}"
        value = header.metadata.get(key, 1.0)
        if not (isinstance(value, int | float) and isfinite(value) and value > 0):
            raise ModelUnsupported(f"its {key} is {header.said(key)}, not a number above 0")
