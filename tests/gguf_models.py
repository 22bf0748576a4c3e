"""Tiny Llama-shaped models in GGUF files, written by the package gguf as llama.cpp's converter writes them."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import gguf
import numpy as np
import numpy.typing as npt

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, LAYERS, VOCABULARY, CONTEXT = 256, 256, 4, 2, 2, 384, 128
SHAPES = {
    "attn_norm": (HIDDEN,),
    "ffn_norm": (HIDDEN,),
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (HIDDEN // 2, HIDDEN),
    "attn_v": (HIDDEN // 2, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (INTERMEDIATE, HIDDEN),
    "ffn_up": (INTERMEDIATE, HIDDEN),
    "ffn_down": (HIDDEN, INTERMEDIATE),
}
Type: TypeAlias = gguf.GGMLQuantizationType
# What layers of an architecture have besides.
OTHERS: dict[str, dict[str, tuple[int, ...]]] = {
    "qwen2": {"attn_q.bias": (HIDDEN,), "attn_k.bias": (HIDDEN // 2,), "attn_v.bias": (HIDDEN // 2,)},
    "qwen3": {f"attn_{part}_norm.weight": (HIDDEN // HEADS,) for part in "qk"},
}
# Of llama.cpp's Q4_K_M, Q5_K_M and Q4_0 files, in one model.
MIXED = {
    "token_embd": Type.Q8_0,
    "attn_q": Type.Q4_K,
    "attn_k": Type.Q4_1,
    "attn_v": Type.Q6_K,
    "attn_output": Type.Q5_0,
    "ffn_gate": Type.Q4_0,
    "ffn_up": Type.Q5_1,
    "ffn_down": Type.Q6_K,
}
# Formats that the package does not write: places of a block's scales, and their sizes. Minimums are subtracted, so they
# are as large as the middle of the codes.
_ONLY_READ: dict[Type, tuple[tuple[int, float], ...]] = {
    Type.Q2_K: ((80, 4e-3), (82, 6e-3)),
    Type.Q3_K: ((108, 1e-3),),
    Type.Q4_K: ((0, 2e-4), (2, 14e-4)),
    Type.Q5_K: ((0, 1e-4), (2, 15e-4)),
    Type.Q6_K: ((208, 2e-5),),
    Type.IQ4_NL: ((0, 6e-4),),
    Type.IQ4_XS: ((0, 4e-5),),
}
Changes = Callable[[gguf.GGUFWriter], None]


def write_llama(
    path: Path,
    types: dict[str, Type],
    architecture: str = "llama",
    change: Changes = lambda _writer: None,
    without: tuple[str, ...] = (),
    part_tensors: int = 0,
) -> Path:
    """Write a model with random weights, in these types by the parts of the tensors' names; others are float32.

    `change` adds metadata or tensors; tensors whose names begin as `without` says are left out. `part_tensors`, if not
    0, is the number of tensors of a part of several; the path of the first part is returned.
    """
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=part_tensors)
    _write_metadata(writer)
    change(writer)  # the last value of a key counts
    shapes = {"token_embd": (VOCABULARY, HIDDEN), "output_norm": (HIDDEN,)}
    shapes |= {f"blk.{layer}.{part}": shape for layer in range(LAYERS) for part, shape in SHAPES.items()}
    for name, shape in shapes.items():
        if not name.startswith(without or ("-",)):
            kind = types.get(name.rpartition(".")[2], Type.F32)
            writer.add_tensor(f"{name}.weight", stored(shape, kind, random), raw_dtype=kind)
    for layer in range(LAYERS):
        for name, shape in OTHERS.get(architecture, {}).items():
            writer.add_tensor(f"blk.{layer}.{name}", stored(shape, Type.F32, random))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return _written(path, part_tensors)


def stored(shape: tuple[int, ...], kind: Type, random: np.random.Generator) -> npt.NDArray[np.generic]:
    """Return random values near those of models, as bytes of a type; float32 as they are."""
    if kind in _ONLY_READ:
        return _blocks(shape, kind, random)
    spread = 0.1 if len(shape) == 1 else 1 / np.sqrt(shape[-1])
    values = (len(shape) == 1) + random.standard_normal(shape, dtype=np.float32) * np.float32(spread)
    return values if kind == Type.F32 else gguf.quants.quantize(values, kind)


def _blocks(shape: tuple[int, ...], kind: Type, random: np.random.Generator) -> npt.NDArray[np.uint8]:
    values, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // values, size), dtype=np.uint8)
    for place, scale in _ONLY_READ[kind]:
        halves = random.uniform(scale, 2 * scale, blocks.shape[:-1])
        blocks[..., place : place + 2] = halves.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def _write_metadata(writer: gguf.GGUFWriter) -> None:
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *_byte_letters(), "ab"]
    tokens += [f"token{number}" for number in range(len(tokens), VOCABULARY)]
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (VOCABULARY - 3))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _byte_letters() -> list[str]:
    """Return the letter that byte-level tokenizers write for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + place) for place in range(len(others))]


def write_gpt2(
    path: Path, change: Changes = lambda _writer: None, part_tensors: int = 0, architecture: str = "gpt2"
) -> Path:
    """Write a GPT-2, which is no Llama-shaped model, in Q8_0. `change` and `part_tensors` are as in `write_llama`."""
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=part_tensors)
    _write_metadata(writer)
    change(writer)
    writer.add_layer_norm_eps(1e-5)
    layer = {
        "attn_qkv.weight": (3 * HIDDEN, HIDDEN),
        "attn_output.weight": (HIDDEN, HIDDEN),
        "ffn_up.weight": (4 * HIDDEN, HIDDEN),
        "ffn_down.weight": (HIDDEN, 4 * HIDDEN),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCABULARY, HIDDEN),
        "position_embd.weight": (1024, HIDDEN),  # as many as transformers assumes
    }
    shapes |= {f"blk.{number}.{name}": shape for number in range(LAYERS) for name, shape in layer.items()}
    shapes |= {name.replace("weight", "bias"): shape[:1] for name, shape in shapes.items() if name.startswith("blk")}
    norms = ("output_norm", *(f"blk.{number}.{name}" for number in range(LAYERS) for name in ("attn_norm", "ffn_norm")))
    shapes |= {f"{name}.{kind}": (HIDDEN,) for name in norms for kind in ("weight", "bias")}
    for name, shape in shapes.items():
        kind = Type.Q8_0 if len(shape) == 2 and name != "position_embd.weight" else Type.F32
        writer.add_tensor(name, stored(shape, kind, random), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return _written(path, part_tensors)


def _written(path: Path, part_tensors: int) -> Path:
    """Return the path that was written, of several parts the first."""
    return min(path.parent.glob(f"{path.stem}-00001-of-*.gguf")) if part_tensors else path
