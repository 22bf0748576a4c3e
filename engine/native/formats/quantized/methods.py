"""The methods of quantization that are served, and why others are refused. It imports no torch."""

import re
from collections.abc import Callable, Iterable, Mapping
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from engine.errors import ModelUnsupported
from engine.native.formats.quantized.bitsandbytes.declaration import bitsandbytes
from engine.native.formats.quantized.compressed_tensors import compressed_tensors
from engine.native.formats.quantized.declared import Declared, declared
from engine.native.formats.quantized.fp8 import fbgemm_fp8, fp8
from engine.native.formats.quantized.integers.auto_round import auto_round
from engine.native.formats.quantized.integers.awq import awq
from engine.native.formats.quantized.integers.gptq import gptq
from engine.native.formats.quantized.modelopt import modelopt
from engine.native.formats.quantized.mxfp4 import mxfp4
from engine.native.formats.quantized.scheme import HELP, Matrices, Scheme
from engine.native.formats.safetensors_files import are_named
from engine.native.formats.tensors import TypedTensor

# A method's module makes a scheme of the fields; it raises ModelUnsupported, naming the field, for what is not served.
METHODS: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "gptq": gptq,
    "awq": awq,
    "bitsandbytes": bitsandbytes,
    "auto-round": auto_round,
    "intel/auto-round": auto_round,
    "compressed-tensors": compressed_tensors,
    "fp8": fp8,
    "fbgemm_fp8": fbgemm_fp8,
    "modelopt": modelopt,
    "mxfp4": mxfp4,
}

_CODES = ("I8", "U8")
_FLOATS = ("F64", "F32", "F16", "BF16")  # safetensors' names of types

_BITS = ("bits", "w_bit", "wbits", "nbits", "num_bits")
_TYPES = ("weights", "quant_type", "weight_dtype", "forward_dtype", "dtype", "_type")
# Objects in which some have them: of HQQ, and of torchao.
_INSIDE = ("quant_config", "weight_quant_params", "quant_type", "default")
_MOST_BITS = 64
_WORD = re.compile(r"[\w.-]{1,40}", re.ASCII)

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


def scheme_of(folder: Path) -> Scheme | None:
    """Return the scheme of a folder's weights, None if they are not quantized.

    Raises ModelUnsupported if its method is not served, or a file cannot be read.
    """
    try:
        found = declared(folder)
    except JSONDecodeError as error:
        raise ModelUnsupported(f"a file that could declare quantized weights is no JSON: {error}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ModelUnsupported(f"a file that could declare quantized weights cannot be read: {error}") from error
    return scheme_by(found) if found else None


def file_with_own_name(folder: Path) -> Path | None:
    """Return a folder's only safetensors file, if its weights are quantized and it has none that transformers reads.

    AutoGPTQ named files after bits and groups, such as gptq_model-4bit-128g.safetensors. Raises ModelUnsupported as
    `scheme_of`.
    """
    found = [] if are_named(folder) else list(folder.glob("*.safetensors"))
    return found[0] if len(found) == 1 and scheme_of(folder) else None


def scheme_by(found: Declared) -> Scheme:
    """Return the scheme of a declaration. Raises ModelUnsupported if it is not served."""
    if not found.method:
        raise ModelUnsupported(f"its weights are quantized by a method that {found.file} does not name: {HELP}")
    if found.method not in METHODS:
        raise ModelUnsupported(f"its weights are quantized ({described(found)}), which is not served: {HELP}")
    return METHODS[found.method](found.fields)


def matrices_of(scheme: Scheme | None, stored: Mapping[str, TypedTensor]) -> Matrices:
    """Return the quantized matrices among a folder's tensors, of which only shapes and types are read.

    Raises ModelUnsupported, naming the tensor, if its parts do not fit, or if weights are codes that the folder does
    not declare: without their scales, they would be taken for values.
    """
    _check_spelling(stored)
    found = scheme.matrices(stored) if scheme else Matrices({}, frozenset())
    rest = [name for name in stored if name not in found.parts]
    for name in rest:
        if fault := undeclared(name, stored, scheme):
            raise ModelUnsupported(fault)
    for name in rest:
        kind = stored[name].get_dtype()
        if _is_codes(kind, len(stored[name].get_shape())) and scheme:
            raise ModelUnsupported(f"its tensor {name} has type {kind}, but no scales of it are known")
        if name.rpartition(".")[2] == "weight" and kind not in _FLOATS:
            raise ModelUnsupported(f"its tensor {name} has type {kind}, but its files do not say how it is quantized")
    return found


def _check_spelling(names: Iterable[str]) -> None:
    """Raise ModelUnsupported if a name has a number in another spelling: then a file could have a matrix twice."""
    for name in names:
        for part in name.split("."):
            if part.isdecimal() and not (part.isascii() and (part == "0" or part[0] != "0")):
                raise ModelUnsupported(f"its tensor {name} has the number {part}, which has another spelling")


def _is_codes(kind: str, dimensions: int) -> bool:
    return kind.startswith("F8") or (kind in _CODES and dimensions in (2, 3))


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
