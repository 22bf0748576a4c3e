"""Models with recurrent states or short convolutions, in some layers or all."""

from tests.model_types.sizes import FULL, NO_WINDOW, UNTIED, Fields, Table

_LINEAR_THEN_FULL = {"layer_types": [*["linear_attention"] * 3, "full_attention"]}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
_TOWER: Fields = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
_QWEN_MARKS: Fields = {
    "image_token_id": 9,
    "video_token_id": 10,
    "vision_start_token_id": 11,
    "vision_end_token_id": 12,
}
_QWEN4: Fields = {
    "hc_count": 2,
    "hc_lowrank": 8,
    "ngram_vocab_size_base": 64,
    "make_ngram_vocab_size_divisible_by": 8,
    "split_ngram_parts": 2,
    "rope_parameters": _MROPE,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
_INKLING: Fields = {
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "sliding_window_size": 7,
    "d_rel": 4,
    "rel_extent": 16,
    "unpadded_vocab_size": 300,
}
_NEMOTRON_H: Fields = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "sliding_window": None,
    "n_groups": 2,
    "chunk_size": 8,
    "moe_shared_expert_intermediate_size": 32,
}
_LATENT_LINEAR: Fields = {"num_key_value_heads": 4, "head_dim": 16, "linear_num_heads": 4}

HYBRID: Table = {
    "bailing_hybrid": {
        "": {"num_key_value_heads": 4, "num_local_experts": 8, "n_group": 4, "topk_group": 2}
        | {"first_k_dense_replace": 1, "layer_group_size": 2, "num_mtp_layers": 0}
    },
    "bamba": {
        "": {"attn_layer_indices": [1, 3]},
        "attention in all layers": {"attn_layer_indices": [0, 1, 2, 3]},
    },
    "falcon_h1": {"": {}},
    "falcon_mamba": {"": {}},
    "granitemoehybrid": {
        "": {"layer_types": ["linear_attention", "full_attention"] * 2},
        "attention in all layers": FULL | {"position_embedding_type": "rope"},
        "attention in all layers, no experts": FULL | {"num_local_experts": 0, "position_embedding_type": "rope"},
        "attention in all layers, no rotations": FULL | {"position_embedding_type": "nope"},
    },
    "inkling2_text": {"": _INKLING | {"n_layers_per_attn_res_block": 2}},
    "inkling_text": {"": _INKLING | {"n_shared_experts": 1}},
    "jamba": {"": {"attn_layer_period": 2, "attn_layer_offset": 1}},
    "kimi_linear": {"": _LATENT_LINEAR | _LINEAR_THEN_FULL | {"q_lora_rank": None, "num_local_experts": 4}},
    "lfm2": {
        "": {"layer_types": ["conv", "full_attention"] * 2},
        "convolution in the last layer": {"layer_types": [*["full_attention"] * 3, "conv"]},
        "attention in all layers": FULL,
    },
    "lfm2_moe": {
        "": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
        "attention in all layers": FULL | {"num_dense_layers": 1},
    },
    "lfm3": {
        "": {"layer_types": ["conv", "full_attention", "sliding_attention", "full_attention"]},
        "attention in all layers": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    },
    "mamba": {"": {}},
    "mamba2": {"": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 8}},
    "minimax": {"": NO_WINDOW | {"block_size": 8}, "attention in all layers": NO_WINDOW | FULL},
    "nemotron_h": {"": _NEMOTRON_H},
    "olmo_hybrid": {"": _LINEAR_THEN_FULL | {"linear_num_key_heads": 4, "linear_num_value_heads": 4}},
    "qwen3_5": {
        "": {
            "text_config": _LINEAR_THEN_FULL | UNTIED | {"model_type": "qwen3_5_text", "rope_parameters": _MROPE},
            "vision_config": _TOWER,
        }
        | _QWEN_MARKS
    },
    "qwen3_5_moe": {
        "": {
            "text_config": _LINEAR_THEN_FULL | UNTIED | {"model_type": "qwen3_5_moe_text", "rope_parameters": _MROPE},
            "vision_config": _TOWER,
        }
        | _QWEN_MARKS
    },
    "qwen3_5_moe_text": {"": _LINEAR_THEN_FULL | UNTIED},
    "qwen3_5_text": {"": _LINEAR_THEN_FULL | UNTIED, "attention in all layers": FULL | UNTIED},
    "qwen3_next": {
        "": _LINEAR_THEN_FULL,
        "attention in all layers": FULL,
        "attention in all layers, dense": FULL | {"mlp_only_layers": [0, 1, 2, 3]},
    },
    "qwen4_exp": {
        "": {"text_config": _QWEN4 | {"model_type": "qwen4_exp_text"}, "vision_config": _TOWER} | _QWEN_MARKS
    },
    "qwen4_exp_text": {"": _QWEN4},
    "recurrent_gemma": {"": {"block_types": ["recurrent", "recurrent", "attention"], "attention_window_size": 7}},
    "rwkv": {"": {"context_length": 128, "attention_hidden_size": 64}},
    "xlstm": {"": {"num_heads": 4, "qk_dim_factor": 1.0, "chunk_size": 8, "autocast_kernel_dtype": "float32"}},
    "zamba": {"": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 2}},
    "zamba2": {
        "": {
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
            "n_mamba_heads": 8,
            "chunk_size": 8,
            "num_key_value_heads": 4,
            "adapter_rank": 8,
        }
    },
    "zaya": {"": {"num_experts_per_tok": 1, "router_hidden_size": 16, "layer_types": ["hybrid"] * 4}},
}
