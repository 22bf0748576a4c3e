"""Sizes that make any configuration small, and parts that several configurations share."""

from typing import Any

# Configurations of a model type by variant. The variant "" is what published models of the type have.
Fields = dict[str, Any]
Table = dict[str, dict[str, Fields]]

CONTEXT = 128
# Neither a multiple of the block size nor a divisor of the budgets that it is tried with.
WINDOW = 7

# A configuration gets those of its class's fields. Wide weights make greedy choices clear.
SIZES: Fields = {
    "vocab_size": 300,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
    "init_std": 0.3,
    "sliding_window": WINDOW,
    # Mixtures of experts.
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    # Multi-head latent attention.
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    # Indices of sparse attention.
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 8,
    # Recurrent layers.
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_d_ssm": 128,
    "mamba_chunk_size": 8,
    "state_size": 16,
    # Encoders beside a decoder; these classes count layers and heads for both.
    "encoder_layers": 4,
    "decoder_layers": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "ffn_dim": 96,
}

TIED = {"tie_word_embeddings": True}
UNTIED = {"tie_word_embeddings": False}
BIASED = {"attention_bias": True}
ONE_KV_HEAD = {"num_key_value_heads": 1}
NO_WINDOW = {"sliding_window": None}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
FULL = {"layer_types": ["full_attention"] * 4}
EVERY_FOURTH_FULL = {"layer_types": [*["sliding_attention"] * 3, "full_attention"]}
LATER_WINDOWS = {"use_sliding_window": True, "max_window_layers": 2}
DENSE_FIRST = {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
GROUPED_EXPERTS = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}


def rotations(kind: str, theta: float = 10000.0, **others: Any) -> Fields:
    """Return rotations of one kind for all layers."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta} | others}


LINEAR = rotations("linear", factor=4.0)
DYNAMIC = rotations("dynamic", factor=4.0)
YARN = rotations("yarn", factor=4.0, original_max_position_embeddings=CONTEXT // 4)
YARN_DEEPSEEK = rotations(
    "yarn", factor=4.0, original_max_position_embeddings=CONTEXT // 4, mscale=1.0, mscale_all_dim=0.7
)
LLAMA3 = rotations(
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=CONTEXT // 4,
)
HALF_ROTATED = rotations("default", partial_rotary_factor=0.5)


def long_rotations(rotated: int, **others: Any) -> Fields:
    """Return rotations of 128k models for `rotated` elements of a head; they are served up to the original context."""
    pairs = range(rotated // 2)
    return {"max_position_embeddings": 4 * CONTEXT, "original_max_position_embeddings": CONTEXT} | rotations(
        "longrope",
        short_factor=[1.0 + 0.1 * place for place in pairs],
        long_factor=[4.0 + 0.1 * place for place in pairs],
        original_max_position_embeddings=CONTEXT,
        **others,
    )
