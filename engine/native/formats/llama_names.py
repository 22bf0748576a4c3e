"""Names, shapes and row orders of Llama-shaped models in GGUF files, as llama.cpp's converter writes them."""

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.errors import ModelUnsupported
from engine.native.formats.gguf_header import GgufHeader

# Those of Mistral are written as llama. Only llama's rows of q and k are in another order than transformers'.
ARCHITECTURES = ("llama", "qwen2", "qwen3")
_REORDERED = ("llama",)
# Factors of the frequencies that positions are rotated by; the folder's configuration has them (Llama 3.1).
ROTATION_FACTORS = "rope_freqs.weight"
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?([a-z_]+)\.(weight|bias)", re.ASCII)


class Named(NamedTuple):
    """A tensor's name in the file, and the number of heads whose rows are in the order of llama.cpp, 0 for none."""

    stored: str
    reordered_heads: int


def names_of(header: GgufHeader) -> dict[str, Named]:
    """Return the tensors by transformers' names; those that Llama-shaped models lack keep their own.

    Raises ModelUnsupported, naming the tensor, if a shape contradicts the metadata.
    """
    sizes = _Sizes.of(header)
    found: dict[str, Named] = {}
    for name in header.tensors:
        if name == ROTATION_FACTORS:
            continue
        match = _NAME.fullmatch(name)
        layer, part, kind = match.groups() if match else (None, "", "")
        module = (_OUTSIDE if layer is None else _IN_LAYER).get(part)
        if module is None:
            found[name] = Named(name, 0)
            continue
        sizes.check(header, name, layer, part, kind)
        heads = {"attn_q": sizes.heads, "attn_k": sizes.kv_heads}.get(part, 0)
        full = f"{module}.{kind}" if layer is None else f"model.layers.{int(layer)}.{module}.{kind}"
        found[full] = Named(name, heads if header.architecture in _REORDERED else 0)
    return found


def row_order(rows: int, heads: int) -> npt.NDArray[np.int64]:
    """Return, for each row of transformers' order, its row in the file.

    llama.cpp rotates neighbours, transformers the element i with i + half of the head: a head's rows (i, i + half) are
    neighbours in the file.
    """
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(rows)


class _Sizes(NamedTuple):
    """Sizes that the metadata declares."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int

    @classmethod
    def of(cls, header: GgufHeader) -> "_Sizes":
        names = ("block_count", "embedding_length", "attention.head_count", "feed_forward_length")
        layers, hidden, heads, intermediate = (_positive(header, name) for name in names)
        kv_heads = _positive(header, "attention.head_count_kv", heads)
        head_size = _positive(header, "attention.key_length", hidden // heads or 1)
        if heads % kv_heads or head_size % 2:
            raise ModelUnsupported(f"its {heads} heads of {head_size} elements cannot share {kv_heads} KV heads")
        return cls(layers, hidden, heads, kv_heads, head_size, intermediate)

    def check(self, header: GgufHeader, name: str, layer: str | None, part: str, kind: str) -> None:
        """Raise ModelUnsupported if a tensor's shape is not that of its place."""
        if layer is not None and int(layer) >= self.layers:
            raise ModelUnsupported(f"it has tensor {name}, but its block_count is {self.layers}")
        shape, expected = header.tensors[name].shape, self._shape(part)
        if kind == "bias":
            expected = expected[:1]
        matches = len(shape) == len(expected) and all(
            want in (0, given) for given, want in zip(shape, expected, strict=True)
        )
        if not matches:
            wanted = tuple("any" if size == 0 else size for size in expected)
            raise ModelUnsupported(f"tensor {name} has shape {shape}, but its metadata gives {wanted}")

    def _shape(self, part: str) -> tuple[int, ...]:
        """Return a tensor's shape; 0 for any number."""
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        shapes: dict[str, tuple[int, ...]] = {
            "token_embd": (0, self.hidden),
            "output": (0, self.hidden),
            "attn_q": (queries, self.hidden),
            "attn_k": (keys, self.hidden),
            "attn_v": (keys, self.hidden),
            "attn_output": (self.hidden, queries),
            "attn_q_norm": (self.head_size,),
            "attn_k_norm": (self.head_size,),
            "ffn_gate": (self.intermediate, self.hidden),
            "ffn_up": (self.intermediate, self.hidden),
            "ffn_down": (self.hidden, self.intermediate),
        }
        return shapes.get(part, (self.hidden,))


def _positive(header: GgufHeader, name: str, default: int | None = None) -> int:
    found = header.number(name)
    if found is None and default is not None:
        return default
    if found is None or found < 1:
        raise ModelUnsupported(f"its metadata lacks a number above 0 as {header.architecture}.{name}")
    return found


def layers_missing(header: GgufHeader) -> Iterator[int]:
    """Yield the layers of the metadata that have no tensor."""
    present = {int(match[1]) for name in header.tensors if (match := _NAME.fullmatch(name)) and match[1]}
    layers = _Sizes.of(header).layers
    if layers > len(present):
        yield next(number for number in range(layers) if number not in present)
