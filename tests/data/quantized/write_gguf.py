"""Writes the folders `gguf-*`: tiny Llamas in GGUF files, one of them in two parts.

Run it with the versions in README.md: `python write_gguf.py`. The package gguf quantizes some formats; of those that it
only reads, blocks are random bytes with scales of a fitting size.
"""

import shutil
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type
from transformers import LlamaConfig

HERE = Path(__file__).parent
HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, VOCABULARY, CONTEXT = 256, 4, 2, 16, 300, 512
SHAPES = {
    "attn_norm": (HIDDEN,),
    "ffn_norm": (HIDDEN,),
    "attn_q": (HEADS * HEAD_SIZE, HIDDEN),
    "attn_k": (KV_HEADS * HEAD_SIZE, HIDDEN),
    "attn_v": (KV_HEADS * HEAD_SIZE, HIDDEN),
    "attn_output": (HIDDEN, HEADS * HEAD_SIZE),
    "ffn_gate": (HIDDEN, HIDDEN),
    "ffn_up": (HIDDEN, HIDDEN),
    "ffn_down": (HIDDEN, HIDDEN),
}
# Formats by parts of names: of all others, then of some.
FOLDERS: dict[str, dict[str, Type]] = {
    "gguf-low-bits": {"": Type.Q2_K, "attn_v": Type.Q3_K, "ffn_up": Type.Q3_K, "ffn_down": Type.Q3_K}
    | {"attn_output": Type.Q4_0},
    "gguf-tables": {"": Type.IQ4_NL, "attn_q": Type.IQ4_XS, "ffn_gate": Type.IQ4_XS, "attn_v": Type.MXFP4}
    | {"attn_output": Type.MXFP4, "ffn_down": Type.MXFP4},
    "gguf-split": {"": Type.Q4_0, "attn_v": Type.Q6_K, "ffn_down": Type.Q4_K, "attn_k": Type.Q5_1},
}
PART_TENSORS = {"gguf-split": 6}
# Places of a block's scales, and their sizes. Minimums are subtracted: they are as large as the middle of the codes.
SCALES: dict[Type, tuple[tuple[int, float], ...]] = {
    Type.Q2_K: ((80, 4e-3), (82, 6e-3)),
    Type.Q3_K: ((108, 1e-3),),
    Type.Q4_K: ((0, 2e-4), (2, 14e-4)),
    Type.Q6_K: ((208, 2e-5),),
    Type.IQ4_NL: ((0, 6e-4),),
    Type.IQ4_XS: ((0, 4e-5),),
}


def stored(shape: tuple[int, ...], kind: Type, random: np.random.Generator) -> npt.NDArray[np.generic]:
    """Return random weights as bytes of a format, norms as they are."""
    if len(shape) == 1:
        return 1 + 0.1 * random.standard_normal(shape, dtype=np.float32)
    if kind not in SCALES:
        return gguf.quants.quantize(random.standard_normal(shape, dtype=np.float32) / np.sqrt(shape[-1]), kind)
    values, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (shape[0], shape[1] // values, size), dtype=np.uint8)
    for place, scale in SCALES[kind]:
        halves = random.uniform(scale, 2 * scale, blocks.shape[:-1]).astype(np.float16)
        blocks[..., place : place + 2] = halves[..., None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


def write(name: str) -> None:
    folder, kinds = HERE / name, FOLDERS[name]
    shutil.rmtree(folder, ignore_errors=True)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": HIDDEN, "num_hidden_layers": 1}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_SIZE}
    others = {"max_position_embeddings": CONTEXT, "bos_token_id": 1, "eos_token_id": 0, "tie_word_embeddings": True}
    config = LlamaConfig(**sizes, **heads, **others, rms_norm_eps=1e-5, architectures=["LlamaForCausalLM"])
    config.save_pretrained(folder)
    writer = gguf.GGUFWriter(folder / f"{name}.gguf", "llama", split_max_tensors=PART_TENSORS.get(name, 0))
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_SIZE)
    writer.add_value_length(HEAD_SIZE)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    random = np.random.default_rng(53)
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (VOCABULARY, HIDDEN), "output_norm": (HIDDEN,)}
    for part, shape in (shapes | {f"blk.0.{part}": shape for part, shape in SHAPES.items()}).items():
        kind = kinds.get(part.rpartition(".")[2], kinds[""]) if len(shape) == 2 else Type.F32
        writer.add_tensor(f"{part}.weight", stored(shape, kind, random), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    for one in FOLDERS:
        write(one)
