"""Names, shapes and row orders of Llama-shaped models in GGUF files, as llama.cpp's converter writes them."""

import re
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from engine.errors import ModelUnsupported
from engine.native.formats.gguf.header import GgufHeader
from engine.native.formats.gguf.llama_metadata import ROTATION_FACTORS, check_dense, check_metadata

# Those of Mistral are written as llama. Only llama's rows of q and k are in another order than transformers'.
ARCHITECTURES = ("llama", "qwen2", "qwen3")
_REORDERED = ("llama",)
_MOST_CONTEXT_TOKENS = 1 << 24
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
# A number has one spelling: with another one, a file could have a tensor twice.
_NAME = re.compile(r"(?:blk\.(0|[1-9]\d{0,8})\.)?([a-z_]+)\.(weight|bias)", re.ASCII)


class Named(NamedTuple):
    """A tensor's name in the file, and the number of heads whose rows are in the order of llama.cpp, 0 for none."""

    stored: str
    reordered_heads: int


def names_of(header: GgufHeader) -> dict[str, Named]:
    """Return the tensors by transformers' names; those that Llama-shaped models lack keep their own.

    Raises ModelUnsupported, naming the tensor, if a shape contradicts the metadata, or a tensor is missing; with the
    key, if metadata are not served.
    """
    check_dense(header)
    _check_complete(header)
    sizes = _Sizes.of(header)
    check_metadata(header, sizes.head_size, sizes.vocabulary)
    found: dict[str, Named] = {}
    for name, place in header.tensors.items():
        if name == ROTATION_FACTORS:
            if (place.format.name, place.shape) != ("F32", (sizes.head_size // 2,)):
                raise ModelUnsupported(f"tensor {name} is {place.format.name} {place.shape}, not F32 for half a head")
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


def _check_complete(header: GgufHeader) -> None:
    """Raise ModelUnsupported if a tensor is missing that each layer has: the file bounds their number too."""
    optional, layers = {"attn_q_norm", "attn_k_norm"}, _positive(header, "block_count")
    needed = (f"blk.{layer}.{part}.weight" for layer in range(layers) for part in _IN_LAYER if part not in optional)
    for name in chain(("token_embd.weight", "output_norm.weight"), needed):
        if name not in header.tensors:
            raise ModelUnsupported(f"it lacks tensor {name}")


class _Sizes(NamedTuple):
    """Sizes that the metadata declares."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int

    @classmethod
    def of(cls, header: GgufHeader) -> "_Sizes":
        names = ("block_count", "embedding_length", "attention.head_count", "feed_forward_length")
        layers, hidden, heads, intermediate = (_positive(header, name) for name in names)
        kv_heads = _positive(header, "attention.head_count_kv", heads)
        head_size = _positive(header, "attention.key_length", hidden // heads or 1)
        if heads % kv_heads or head_size % 2:
            raise ModelUnsupported(f"its {heads} heads of {head_size} elements cannot share {kv_heads} KV heads")
        if (context := _positive(header, "context_length")) > _MOST_CONTEXT_TOKENS:
            raise ModelUnsupported(f"its context_length is {context}, more than {_MOST_CONTEXT_TOKENS}")
        # Files without a number have as many tokens as rows, or the configuration contradicts the tensor.
        vocabulary = _positive(header, "vocab_size", header.tensors["token_embd.weight"].shape[0])
        return cls(layers, hidden, heads, kv_heads, head_size, intermediate, vocabulary)

    def check(self, header: GgufHeader, name: str, layer: str | None, part: str, kind: str) -> None:
        """Raise ModelUnsupported if a tensor's shape is not that of its place."""
        if layer is not None and int(layer) >= self.layers:
            raise ModelUnsupported(f"it has tensor {name}, but its block_count is {self.layers}")
        place = header.tensors[name]
        expected = self._shape(part)
        if kind == "bias":
            expected = expected[:1]
        if place.shape != expected:
            where = f" in {header.files[place.part].name}" if place.part else ""
            raise ModelUnsupported(f"tensor {name}{where} has shape {place.shape}, but its metadata gives {expected}")

    def _shape(self, part: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        shapes: dict[str, tuple[int, ...]] = {
            "token_embd": (self.vocabulary, self.hidden),
            "output": (self.vocabulary, self.hidden),
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
