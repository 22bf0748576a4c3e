"""Decoders with multi-head latent attention, and with indices of sparse attention."""

from tests.model_types.sizes import DENSE_FIRST, GROUPED_EXPERTS, UNTIED, YARN_DEEPSEEK, Fields, Table

# transformers expands the latents to keys and values for each head of queries.
_LATENT: Fields = {"num_key_value_heads": 4, "head_dim": 8}
_DEEPSEEK3 = _LATENT | GROUPED_EXPERTS | {"first_k_dense_replace": 1}
_DEEPSEEK2 = _LATENT | {"first_k_dense_replace": 1, "num_experts_per_tok": 2, "n_shared_experts": 2}
_INDEXED = _LATENT | GROUPED_EXPERTS | DENSE_FIRST
_FULL_QUERIES = {"q_lora_rank": None}
_EQUAL_SIZES = {"v_head_dim": 24}
_DOTS3: Fields = {
    "n_routed_experts": 4,
    "num_key_value_heads": 4,
    "head_dim": 24,
    "first_k_dense_replace": 1,
    "shared_experts_intermediate_size": 32,
    "sliding_window_size": 7,
}
_DOTS3_TEXT = _DOTS3 | {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 24,
    "swa_kv_lora_rank": 32,
    "swa_head_dim": 24,
    "swa_qk_nope_head_dim": 16,
    "swa_v_head_dim": 16,
}
_TOWER: Fields = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "mlp_layer_types": ["dense"],
    "adapter_in_dim": 16,
    "adapter_out_dim": 64,
}

LATENT: Table = {
    "axk1": {
        "": _LATENT | GROUPED_EXPERTS | DENSE_FIRST,
        "equal sizes": _LATENT | _EQUAL_SIZES | {"n_group": 1, "topk_group": 1},
    },
    "axk2": {"": _LATENT | {"gated_norm_rank": 4}},
    "deepseek_v2": {
        "": _DEEPSEEK2 | YARN_DEEPSEEK | {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1},
        "without query latents": _DEEPSEEK2 | _FULL_QUERIES | {"topk_method": "greedy"},
        "equal sizes": _DEEPSEEK2 | _FULL_QUERIES | _EQUAL_SIZES,
    },
    "deepseek_v3": {
        "": _DEEPSEEK3 | YARN_DEEPSEEK,
        "without query latents": _DEEPSEEK3 | _FULL_QUERIES,
        "rotations not interleaved": _DEEPSEEK3 | {"rope_interleave": False},
        "one group of experts": _LATENT | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 3},
        "experts in all layers": _DEEPSEEK3 | {"first_k_dense_replace": 0, "norm_topk_prob": False},
        "equal sizes": _DEEPSEEK3 | _EQUAL_SIZES,
        "biases": _DEEPSEEK3 | {"attention_bias": True},
    },
    "deepseek_v32": {"": _INDEXED | {"first_k_dense_replace": 1}},
    "deepseek_v4": {
        "": {
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "partial_rotary_factor": 0.25,
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
            "num_hash_layers": 1,
            "o_groups": 2,
            "o_lora_rank": 16,
        }
    },
    "dots3_note": {
        "": {
            "text_config": _DOTS3_TEXT | {"model_type": "dots3_note_text"},
            "vision_config": _TOWER,
            "audio_config": {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
            | {"num_attention_heads": 2, "downsample_hidden_size": 8, "adapter_input_size": 16, "adapter_out_dim": 64},
        }
    },
    "dots3_note_text": {"": _DOTS3_TEXT},
    "glm4_moe_lite": {
        "": _LATENT | DENSE_FIRST | {"n_group": 1, "topk_group": 1},
        "without query latents": _LATENT | DENSE_FIRST | _FULL_QUERIES,
        "values larger than keys": _LATENT | DENSE_FIRST | {"v_head_dim": 32},
        "equal sizes": _LATENT | DENSE_FIRST | _EQUAL_SIZES,
    },
    "glm_moe_dsa": {"": _INDEXED | {"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}},
    "hy_v4": {"": _LATENT | {"hc_mult": 2}},
    "longcat_flash": {
        "": {
            "num_layers": 2,
            "head_dim": 8,
            "num_key_value_heads": 4,
            "ffn_hidden_size": 96,
            "expert_ffn_hidden_size": 32,
            "moe_topk": 2,
            "zero_expert_num": 2,
        }
    },
    "minicpm3": {
        "": {"num_key_value_heads": 4, "dim_model_base": 16},
        "equal sizes": {"num_key_value_heads": 4, "dim_model_base": 16} | _EQUAL_SIZES,
        "untied head": {"num_key_value_heads": 4, "dim_model_base": 16} | UNTIED,
    },
    "youtu": {
        "": {"num_key_value_heads": 4, "head_dim": 8},
        "without query latents": {"num_key_value_heads": 4, "head_dim": 8} | _FULL_QUERIES,
        "equal sizes": {"num_key_value_heads": 4, "head_dim": 8} | _EQUAL_SIZES,
    },
}
