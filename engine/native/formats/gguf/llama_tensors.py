"""Tensors of a Llama-shaped GGUF file that its architecture does not know, or that only go together."""

import re
from collections.abc import Iterable

from engine.errors import ModelUnsupported
from engine.native.formats.gguf.header import GgufHeader
from engine.native.formats.gguf.llama_metadata import ROTATION_FACTORS

_QUERIES, _GATES = ("attn_q.bias", "attn_k.bias", "attn_v.bias"), ("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")
_NORMS = ("attn_q_norm.weight", "attn_k_norm.weight")
_OUTPUT = "attn_output.bias"
# What layers have besides their matrices and norms, in groups: all layers have all of a group, or none.
_GROUPS: dict[str, tuple[tuple[str, ...], ...]] = {
    "llama": ((*_QUERIES, _OUTPUT), _GATES),
    "qwen2": (_QUERIES,),
    "qwen3": (_NORMS, (*_QUERIES, _OUTPUT)),
}
# Groups without which the architecture is none.
_NEEDED = {"qwen2": _QUERIES, "qwen3": _NORMS}
_OUTSIDE = {"token_embd.weight", "output_norm.weight", "output.weight", ROTATION_FACTORS}
_MATRICES = {"attn_norm", "ffn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"}
_LAYER = re.compile(r"blk\.(0|[1-9]\d*)\.(.+)", re.ASCII)


def check_tensors(header: GgufHeader) -> None:
    """Raise ModelUnsupported, naming the tensor, if one is unknown, or lacks another one.

    The header is one whose names and shapes hold (`names_of`).
    """
    groups = _GROUPS[header.architecture]
    known = {f"{name}.weight" for name in _MATRICES}.union(*groups)
    for name in header.tensors:
        match = _LAYER.fullmatch(name)
        if name not in _OUTSIDE and (match is None or match[2] not in known):
            raise ModelUnsupported(f"it has the unknown tensor {name}")
    for group in groups:
        _check_group(header, group)


def _check_group(header: GgufHeader, group: Iterable[str]) -> None:
    names = [f"blk.{layer}.{part}" for layer in range(header.number("block_count") or 0) for part in group]
    lacking = next((name for name in names if name not in header.tensors), None)
    present = next((name for name in names if name in header.tensors), None)
    if lacking and present:
        raise ModelUnsupported(f"it lacks tensor {lacking}, although it has {present}: they only go together")
    if lacking and group == _NEEDED.get(header.architecture):
        raise ModelUnsupported(f"it lacks tensor {lacking}")
