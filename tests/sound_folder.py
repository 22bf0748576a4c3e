"""The smallest sound folder of a model: a llama of one layer, whose vocabulary is four letters."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file

LETTERS = "abcd"
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": len(LETTERS),
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": 0,
}
_IN_LAYER = {
    "input_layernorm": (8,),
    "post_attention_layernorm": (8,),
    "self_attn.q_proj": (8, 8),
    "self_attn.k_proj": (4, 8),
    "self_attn.v_proj": (4, 8),
    "self_attn.o_proj": (8, 8),
    "mlp.gate_proj": (16, 8),
    "mlp.up_proj": (16, 8),
    "mlp.down_proj": (8, 16),
}


def write_sound_folder(folder: Path, **changed: Any) -> Path:
    """Write the folder, with other values in its `config.json`, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | changed))
    (folder / "generation_config.json").write_text('{"eos_token_id": 0}')
    (folder / "tokenizer_config.json").write_text('{"eos_token": "a"}')
    tokenizers.Tokenizer(tokenizers.models.BPE({letter: at for at, letter in enumerate(LETTERS)}, [])).save(
        str(folder / "tokenizer.json")
    )
    save_file(tensors(), folder / "model.safetensors", {"format": "pt"})
    return folder


def tensors() -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Return the weights: random, always the same."""
    random = np.random.default_rng(0)
    shapes = {"model.embed_tokens": (len(LETTERS), 8), "model.norm": (8,)}
    shapes |= {f"model.layers.0.{name}": shape for name, shape in _IN_LAYER.items()}
    return {f"{name}.weight": random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
