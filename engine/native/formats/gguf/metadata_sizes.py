"""Bounds on the sizes that a GGUF file's metadata declares, for models of any family.

transformers makes a model of these sizes before it reads a tensor. What a file's tensors cannot fill is refused before.
"""

import re

from engine.errors import ModelUnsupported
from engine.native.formats.gguf.header import GgufHeader, TensorPlace

_SIZES = (
    "embedding_length",
    "feed_forward_length",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
    "expert_count",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "vocab_size",
)
# Without these, transformers would take those of another model.
_NEEDED = ("context_length", "embedding_length", "block_count", "attention.head_count")
_EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
_EMBEDDING, _TOKENS = "token_embd.weight", "tokenizer.ggml.tokens"
# A matrix for each expert of a layer, and the place of the elements inside an expert in its shape.
_EXPERTS = re.compile(r"blk\.\d+\.ffn_(gate|up|down)_exps\.weight")
_INSIDE = {"gate": 1, "up": 1, "down": 2}


def check_sizes(header: GgufHeader) -> None:
    """Raise ModelUnsupported, with the key, if a size is missing, or the file's tensors cannot have it."""
    _check_present(header)
    counted, longest = len(header.tensors), max((max(one.shape) for one in header.tensors.values()), default=0)
    layers = header.number("block_count") or 0
    if layers > counted:
        raise ModelUnsupported(f"its {header.architecture}.block_count is {layers}, but it has {counted} tensors")
    for name in _SIZES:
        if (size := header.number(name) or 0) > longest:
            key = f"{header.architecture}.{name}"
            raise ModelUnsupported(f"its {key} is {size}, but no dimension of its tensors is longer than {longest}")
    _check_vocabulary(header)
    _check_experts(header)


def _check_present(header: GgufHeader) -> None:
    for name in _NEEDED:
        if (header.number(name) or 0) < 1:
            raise ModelUnsupported(f"its metadata lacks a number above 0 as {header.architecture}.{name}")
    names = [f"{header.architecture}.{name}" for name in _EPSILONS]
    if not any(name in header.metadata for name in names):
        raise ModelUnsupported(f"its metadata lacks a number above 0 as {' or '.join(names)}")


def _check_vocabulary(header: GgufHeader) -> None:
    """Raise ModelUnsupported, with the key, unless tokens and rows of the embedding are equally many."""
    if not (embedding := header.tensors.get(_EMBEDDING)):
        return
    rows, key = embedding.shape[0], f"{header.architecture}.vocab_size"
    if (size := header.number("vocab_size")) not in (None, rows):
        raise ModelUnsupported(f"its {key} is {size}, but tensor {_EMBEDDING} has {rows} rows")
    if (tokens := header.arrays.get(_TOKENS)) and tokens.elements != rows:
        raise ModelUnsupported(f"its {_TOKENS} has {tokens.elements} elements, but tensor {_EMBEDDING} has {rows} rows")


def _check_experts(header: GgufHeader) -> None:
    """Raise ModelUnsupported, with the key or the tensor, unless experts are declared as the tensors have them."""
    declared, used = header.number("expert_count") or 0, header.number("expert_used_count") or 0
    key = f"{header.architecture}.expert_count"
    found = [(match[1], header.tensors[name]) for name in header.tensors if (match := _EXPERTS.fullmatch(name))]
    if declared and not found:
        raise ModelUnsupported(f"its {key} is {declared}, but it has no tensors of experts (blk.*.ffn_*_exps.weight)")
    if used > declared or (declared and not used):
        chosen = f"{header.architecture}.expert_used_count"
        raise ModelUnsupported(f"its {chosen} is {used}, but its {key} is {declared}")
    for part, place in found:
        _check_expert(header, part, place, declared)


def _check_expert(header: GgufHeader, part: str, place: TensorPlace, declared: int) -> None:
    inside = header.number("expert_feed_forward_length")
    if len(place.shape) != 3 or place.shape[0] != declared:
        key = f"{header.architecture}.expert_count"
        raise ModelUnsupported(f"tensor {place.name} has shape {place.shape}, but its {key} is {declared}")
    if inside and place.shape[_INSIDE[part]] != inside:
        key = f"{header.architecture}.expert_feed_forward_length"
        raise ModelUnsupported(f"tensor {place.name} has shape {place.shape}, but its {key} is {inside}")
