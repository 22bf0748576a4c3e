"""Decoders with mixtures of experts, of keys and values as in dense ones."""

from tests.model_types.sizes import (
    ALTERNATING,
    BIASED,
    DENSE_FIRST,
    EVERY_FOURTH_FULL,
    FULL,
    GROUPED_EXPERTS,
    HALF_ROTATED,
    LATER_WINDOWS,
    NO_WINDOW,
    TIED,
    UNTIED,
    YARN,
    Fields,
    Table,
    long_rotations,
)

_GRANITE: Fields = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 4.0,
}
_LLAMA4: Fields = {
    "intermediate_size": 32,
    "intermediate_size_mlp": 96,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 8,
    "floor_scale": 8,
}
_FULL_LLAMA4 = _LLAMA4 | FULL | {"no_rope_layers": [1, 1, 1, 0]}
_LLAMA4_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
    "vision_output_dim": 16,
    "projector_input_dim": 16,
    "projector_output_dim": 16,
}
_ERNIE: Fields = {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1}
_LAGUNA: Fields = ALTERNATING | {"num_attention_heads_per_layer": [4, 4, 4, 4], "gating": True}

EXPERTS: Table = {
    "afmoe": {
        "": {"num_dense_layers": 1, "mup_enabled": True, "route_scale": 2.0},
        "every other layer full": {"global_attn_every_n_layers": 2, "num_dense_layers": 2},
    },
    "aria_text": {"": {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}},
    "beam": {
        "": GROUPED_EXPERTS | {"num_experts": 8} | DENSE_FIRST | EVERY_FOURTH_FULL,
        "low softcap": {"final_logit_softcapping": 5.0, "n_group": 1, "topk_group": 1},
    },
    "cohere2_moe": {
        "": {"num_shared_experts": 0},
        "shared experts": {"first_k_dense_replace": 1, "prefix_dense_intermediate_size": 48},
        "chosen by sigmoid": {"expert_selection_fn": "sigmoid", "norm_topk_prob": False},
    },
    "dbrx": {
        "": {
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 4,
            "max_seq_len": 128,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
        }
    },
    "dots1": {
        "": GROUPED_EXPERTS | NO_WINDOW | {"num_key_value_heads": 4, "first_k_dense_replace": 1},
        "windows in later layers": GROUPED_EXPERTS | {"max_window_layers": 2, "norm_topk_prob": True},
    },
    "ernie4_5_moe": {
        "": _ERNIE | {"moe_layer_start_index": 1},
        "experts in every other layer": _ERNIE | {"moe_layer_interval": 2, "use_bias": True} | UNTIED,
    },
    "exaone_moe": {
        "": {"n_group": 1, "first_k_dense_replace": 1},
        "groups of experts": {"num_experts": 8, "n_group": 4, "topk_group": 2},
        "without windows": FULL,
    },
    "flex_olmo": {"": {}, "normalized weights of experts": {"norm_topk_prob": True}},
    "flint": {
        "": {"layer_types": ["full_attention", "full_attention", "sliding_attention", "full_attention"]},
        "windows in every other layer": ALTERNATING | {"mlp_only_layers": []},
        "without windows": FULL,
    },
    "glm4_moe": {
        "": HALF_ROTATED | {"first_k_dense_replace": 1, "use_qk_norm": True},
        "groups of experts": HALF_ROTATED | GROUPED_EXPERTS | BIASED,
        "experts in all layers": HALF_ROTATED | {"first_k_dense_replace": 0, "norm_topk_prob": False},
    },
    "granitemoe": {"": _GRANITE, "tied head": _GRANITE | TIED},
    "granitemoeshared": {"": _GRANITE, "without shared experts": _GRANITE | {"shared_intermediate_size": 0}},
    "hunyuan_v1_moe": {"": {"moe_topk": 2}},
    "hy_v3": {"": DENSE_FIRST, "experts in all layers": {"mlp_layer_types": ["sparse"] * 4}},
    "jetmoe": {"": {"kv_channels": 16, "num_key_value_heads": 2}, "untied head": UNTIED | {"kv_channels": 16}},
    "kolibri1": {"": EVERY_FOURTH_FULL, "windows in every other layer": ALTERNATING | {"norm_topk_prob": True}},
    "laguna": {
        "": _LAGUNA,
        "layers of different heads": _LAGUNA | {"num_attention_heads_per_layer": [4, 8, 4, 8]},
        "without gates": _LAGUNA | {"gating": False},
        "capped router": _LAGUNA | {"moe_router_logit_softcapping": 2.0, "moe_routed_scaling_factor": 2.5},
    },
    "llama4": {"": {"text_config": _LLAMA4 | {"model_type": "llama4_text"}, "vision_config": _LLAMA4_TOWER}},
    "llama4_text": {
        "": _LLAMA4,
        "without chunks": _FULL_LLAMA4 | {"attn_temperature_tuning": False},
        "without chunks, queries scaled by position": _FULL_LLAMA4,
        "without chunks, scaled beyond the context": _FULL_LLAMA4 | {"floor_scale": 8192},
        "experts in every other layer": _FULL_LLAMA4
        | {"attn_temperature_tuning": False, "interleave_moe_layer_step": 2, "use_qk_norm": False},
    },
    "mellum": {"": ALTERNATING, "without windows": {}, "dense first": EVERY_FOURTH_FULL | DENSE_FIRST},
    "minimax_m2": {"": HALF_ROTATED},
    "minimax_m3_vl_text": {
        "": {
            "layer_types": ["full_attention", *["minimax_m3_sparse"] * 3],
            "index_block_size": 4,
            "index_topk_blocks": 4,
            "dense_intermediate_size": 96,
            "intermediate_size": 32,
            "rotary_dim": 8,
        }
        | DENSE_FIRST,
        "full attention in all layers": {"dense_intermediate_size": 96, "intermediate_size": 32, "rotary_dim": 8}
        | DENSE_FIRST,
    },
    "mixtral": {"": NO_WINDOW, "windows": {}},
    "olmoe": {"": {"num_key_value_heads": 4}, "clipped queries, keys and values": {"clip_qkv": 0.5}},
    "phimoe": {
        "": long_rotations(16, short_mscale=1.1, long_mscale=1.2) | NO_WINDOW | BIASED | {"lm_head_bias": True},
        "plain rotations": NO_WINDOW,
        "windows": {},
    },
    "qwen2_moe": {
        "": {"num_key_value_heads": 4},
        "windows": LATER_WINDOWS,
        "experts in every other layer": {"decoder_sparse_step": 2, "norm_topk_prob": True},
    },
    "qwen3_moe": {
        "": {"norm_topk_prob": True},
        "windows": {"use_sliding_window": True},
        "some dense layers": {"mlp_only_layers": [0, 2], "norm_topk_prob": True},
        "YaRN": {"norm_topk_prob": True} | YARN,
    },
    "solar_open": {"": {}, "groups of experts": GROUPED_EXPERTS},
}
