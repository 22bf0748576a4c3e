"""Which method tensors look like that no declaration explains. It imports no torch: a start is refused early."""

from collections.abc import Mapping

from engine.native.formats.quantized.scheme import Scheme
from engine.native.formats.tensors import TypedTensor

_WORDS = ("qweight", "qzeros", "g_idx")
# Methods by suffixes of parts of their matrices.
_METHODS = {
    "weight_packed": "compressed-tensors",
    "weight_scale": "compressed-tensors or ModelOpt",
    "weight_scale_inv": "FP8",
    "SCB": "bitsandbytes",
    "quant_map": "bitsandbytes",
    "gate_up_proj_blocks": "MXFP4",
    "down_proj_blocks": "MXFP4",
    "W_q": "HQQ",
}
# Files beside config.json that may declare a method.
_FILES = {
    "GPTQ": "quantize_config.json",
    "AWQ": "quant_config.json",
    "compressed-tensors or ModelOpt": "hf_quant_config.json",
}
_OUTPUTS = 8  # of AWQ's words


def undeclared(name: str, stored: Mapping[str, TypedTensor], scheme: Scheme | None) -> str:
    """Return why a part of a quantized matrix cannot be read, empty for other tensors. `scheme` is what is declared."""
    suffix = name.rpartition(".")[2]
    if suffix not in _WORDS and suffix not in _METHODS:
        return ""
    method = _METHODS.get(suffix) or _method_of_words(name.rpartition(".")[0], stored)
    found = f"its tensor {name} looks like a part of weights quantized by {method}, but"
    if scheme:
        return f"{found} its files declare {scheme.label}"
    missing = f", and {_FILES[method]} is missing" if method in _FILES else ""
    return f"{found} config.json has no quantization_config{missing}: without it, the weights cannot be read"


def _method_of_words(module: str, stored: Mapping[str, TypedTensor]) -> str:
    """Return the method of a matrix in int32 words: those of AWQ have outputs, those of GPTQ inputs."""
    names = [f"{module}.{suffix}" for suffix in ("qweight", "scales")]
    columns = [stored[name].get_shape()[-1:] for name in names if name in stored]
    words, outputs = (one[0] if one else 0 for one in columns) if len(columns) == len(names) else (0, 0)
    if f"{module}.g_idx" in stored or words == outputs > 0:
        return "GPTQ"
    return "AWQ" if words * _OUTPUTS == outputs > 0 else "GPTQ or AWQ"
