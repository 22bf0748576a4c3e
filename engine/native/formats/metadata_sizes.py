"""Bounds on the sizes that a GGUF file's metadata declares, for models of any family.

transformers makes a model of these sizes before it reads a tensor. What a file's tensors cannot fill is refused before.
"""

from engine.errors import ModelUnsupported
from engine.native.formats.gguf_header import GgufHeader

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


def check_sizes(header: GgufHeader) -> None:
    """Raise ModelUnsupported, with the key, if a declared size is larger than the file's tensors can have."""
    counted, longest = len(header.tensors), max((max(one.shape) for one in header.tensors.values()), default=0)
    layers = header.number("block_count") or 0
    if layers > counted:
        raise ModelUnsupported(f"its {header.architecture}.block_count is {layers}, but it has {counted} tensors")
    for name in _SIZES:
        if (size := header.number(name) or 0) > longest:
            key = f"{header.architecture}.{name}"
            raise ModelUnsupported(f"its {key} is {size}, but no dimension of its tensors is longer than {longest}")
