"""Small random checkpoints of the families in docs/models.md, and of further ones."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

CONTEXT = 96
# Neither a multiple of the block size nor a divisor of the budgets that it is tested with.
WINDOW = 7

SMALL = {
    "vocab_size": 384,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
GROUPED = SMALL | {"intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16}
WINDOWED = GROUPED | {"sliding_window": WINDOW}
LATER_LAYERS_WINDOWED = WINDOWED | {"use_sliding_window": True, "max_window_layers": 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
UNTIED = {"tie_word_embeddings": False}
OPT = SMALL | {"ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.3}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0 + 0.1 * place for place in range(8)],
    "long_factor": [4.0 + 0.1 * place for place in range(8)],
    "original_max_position_embeddings": CONTEXT,
}


class Family(NamedTuple):
    """A configured family of transformers; `plain` are the settings that disable its windows and softcaps."""

    name: str
    config: dict[str, Any]
    plain: dict[str, Any] = {}  # noqa: RUF012 - never changed


NO_WINDOW = {"sliding_window": None}
FAMILIES = {
    "llama": Family("llama", GROUPED),
    "mistral": Family("mistral", WINDOWED, NO_WINDOW),
    "mixtral": Family("mixtral", WINDOWED | EXPERTS, NO_WINDOW),
    "qwen2": Family("qwen2", GROUPED),
    "qwen2 with windows": Family("qwen2", LATER_LAYERS_WINDOWED, {"use_sliding_window": False}),
    "qwen3": Family("qwen3", GROUPED),
    "qwen3 with windows": Family("qwen3", LATER_LAYERS_WINDOWED, {"use_sliding_window": False}),
    "gemma2": Family("gemma2", WINDOWED | UNTIED, {"sliding_window": CONTEXT}),
    "gemma2 with low caps": Family(
        "gemma2",
        WINDOWED | UNTIED | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
        {"attn_logit_softcapping": None},
    ),
    "gpt_neox": Family("gpt_neox", SMALL | {"intermediate_size": 96}),
    "phi3": Family("phi3", WINDOWED, NO_WINDOW),
    "phi3 with long rotations": Family(
        "phi3",
        GROUPED
        | {"max_position_embeddings": 4 * CONTEXT, "original_max_position_embeddings": CONTEXT}
        | {"rope_parameters": LONG_ROPE},
    ),
    "gpt_bigcode": Family("gpt_bigcode", SMALL),
    "gpt_bigcode with many KV heads": Family("gpt_bigcode", SMALL | {"multi_query": False}),
    "opt": Family("opt", OPT),
    "opt with projections": Family("opt", OPT | {"word_embed_proj_dim": 32}),
    "gpt2": Family("gpt2", SMALL),
    "gpt2 scaled by layer": Family("gpt2", SMALL | {"scale_attn_by_inverse_layer_idx": True}),
}
FURTHER = {
    "cohere2": WINDOWED,
    "exaone4": WINDOWED,
    "gemma": GROUPED,
    "gemma3_text": WINDOWED | UNTIED,
    "glm4": GROUPED,
    "granite": GROUPED,
    "moshi": SMALL | {"ffn_dim": 192, "num_key_value_heads": 2, "head_dim": 16},
    "olmo2": GROUPED,
    "olmo3": WINDOWED,
    "phi": GROUPED,
    "qwen3_moe": GROUPED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "smollm3": GROUPED,
    "starcoder2": WINDOWED,
}

Checkpoint = Callable[[Family], Path]


def write_checkpoint(family: Family, folder: Path) -> None:
    """Write a random checkpoint; equal weights for configurations of equal shapes."""
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(CONFIG_MAPPING[family.name](**deepcopy(family.config))).save_pretrained(folder)
