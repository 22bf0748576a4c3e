"""Decoders with windows in some layers or all, with sinks, and with layers of different heads."""

from tests.model_types.sizes import (
    ALTERNATING,
    BIASED,
    EVERY_FOURTH_FULL,
    FULL,
    LLAMA3,
    NO_WINDOW,
    UNTIED,
    WINDOW,
    YARN,
    Fields,
    Table,
)

_EXPERTS = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32, "enable_moe_block": True}
_LOW_CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
_TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_SIGLIP = _TOWER | {"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 8}
_MARKS = {f"{kind}_token_{name}": token for kind, token in (("image", 9), ("video", 10)) for name in ("id", "index")}
_GEMMA_MARKS = _MARKS | {
    **{f"{kind}_token_{name}": 11 for kind in ("boi", "eoi", "boa", "eoa") for name in ("id", "index")},
    "audio_token_id": 12,
}
_TWO_ROTATIONS = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
}

# Gemma-4: full layers have larger heads, fewer of keys and values, and rotate a part of them.
_PER_LAYER = {"vocab_size_per_layer_input": 300, "hidden_size_per_layer_input": 8}
_NO_PER_LAYER = {"vocab_size_per_layer_input": 0, "hidden_size_per_layer_input": 0}
_SMALL_GEMMA4 = ALTERNATING | _PER_LAYER | UNTIED | {"global_head_dim": 32}
_LARGE_GEMMA4 = (
    ALTERNATING
    | _NO_PER_LAYER
    | UNTIED
    | {"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
)
_EQUAL_GEMMA4 = _SMALL_GEMMA4 | {"global_head_dim": 16}
_UNIFIED = (
    ALTERNATING | UNTIED | {"global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True}
) | _NO_PER_LAYER
_ASSISTANT = ALTERNATING | {"global_head_dim": 32, "num_kv_shared_layers": 4}

_GEMMA3N = {
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 300,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0, 0.0, 0.0],
    "altup_num_inputs": 2,
}
_SWA: Fields = {"layer_types": ["full_attention", "sliding_attention"] * 2, "layer_rope_theta": [10000.0] * 4}
_SWA_SCALED = _SWA | {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 4.0,
}
_MIMO: Fields = {
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "num_key_value_heads": 1,  # twice as many in layers with windows
    "head_dim": 24,
    "v_head_dim": 16,
}

WINDOWS: Table = {
    "cohere2": {
        "": {},
        "windows in every other layer": ALTERNATING | UNTIED,
        "biases": BIASED,
        "logits scaled up": {"logit_scale": 0.5},
    },
    "cohere_compass_text": {
        "": EVERY_FOURTH_FULL | {"logit_scale": 0.25} | {"rope_parameters": _TWO_ROTATIONS},
    },
    "cwm": {"": LLAMA3},
    "exaone4": {"": {}, "without windows": NO_WINDOW | FULL, "windows in every other layer": ALTERNATING},
    "gemma2": {
        "": UNTIED,
        "low caps": UNTIED | _LOW_CAPS,
        "tied head": {"initializer_range": 0.05},
        "without caps": UNTIED | dict.fromkeys(_LOW_CAPS),
    },
    "gemma3": {
        "": {
            "text_config": ALTERNATING | UNTIED | {"model_type": "gemma3_text"},
            "vision_config": _SIGLIP,
            "mm_tokens_per_image": 4,
        }
        | _GEMMA_MARKS
        | UNTIED
    },
    "gemma3_text": {
        "": ALTERNATING | UNTIED,
        "six layers": {
            "num_hidden_layers": 6,
            "layer_types": [*["sliding_attention"] * 5, "full_attention"],
            "query_pre_attn_scalar": 24,
        }
        | UNTIED,
        "later tokens seen": {"use_bidirectional_attention": True} | UNTIED,
        "linear rotations": ALTERNATING
        | UNTIED
        | {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            }
        },
    },
    "gemma3n": {
        "": {
            "text_config": _GEMMA3N | UNTIED | {"model_type": "gemma3n_text"},
            "vision_config": {"model_type": "gemma3n_vision", "hidden_size": 16},
            "audio_config": {"model_type": "gemma3n_audio", "hidden_size": 16, "conf_num_hidden_layers": 1}
            | {"conf_num_attention_heads": 2},
        }
        | _GEMMA_MARKS
        | UNTIED
    },
    "gemma3n_text": {
        "": _GEMMA3N | UNTIED,
        "own keys and values in all layers": _GEMMA3N | UNTIED | {"num_kv_shared_layers": 0},
    },
    "gemma4": {
        "": {
            "text_config": _SMALL_GEMMA4 | {"model_type": "gemma4_text"},
            "vision_config": _TOWER
            | {"model_type": "gemma4_vision", "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16},
            "audio_config": None,
        }
        | _GEMMA_MARKS
        | UNTIED
    },
    "gemma4_assistant": {
        "": {
            "text_config": _ASSISTANT | _NO_PER_LAYER | {"model_type": "gemma4_text"},
            "backbone_hidden_size": 64,
            "num_centroids": 8,
        }
    },
    "gemma4_text": {
        "": _SMALL_GEMMA4 | {"num_kv_shared_layers": 2},
        "own keys and values in all layers": _SMALL_GEMMA4,
        "keys as values": _LARGE_GEMMA4,
        "keys as values, capped logits": _LARGE_GEMMA4 | {"final_logit_softcapping": 5.0},
        "experts": _LARGE_GEMMA4 | _EXPERTS,
        "wide layers without own keys": _SMALL_GEMMA4 | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
        "equal heads": _EQUAL_GEMMA4,
        "equal heads, shared keys and values": _EQUAL_GEMMA4 | {"num_kv_shared_layers": 2},
        "equal heads, experts": _EQUAL_GEMMA4 | _EXPERTS,
    },
    "gemma4_unified": {
        "": {
            "text_config": _UNIFIED | {"model_type": "gemma4_unified_text"},
            "vision_config": {
                "model_type": "gemma4_unified_vision",
                "mm_embed_dim": 16,
                "mm_posemb_size": 16,
                "output_proj_dims": 16,
            },
            "audio_config": {"model_type": "gemma4_unified_audio", "audio_embed_dim": 16},
        }
        | _GEMMA_MARKS
        | UNTIED
    },
    "gemma4_unified_assistant": {
        "": {
            "text_config": _ASSISTANT | {"model_type": "gemma4_unified_text"},
            "backbone_hidden_size": 64,
            "num_centroids": 8,
        }
    },
    "gemma4_unified_text": {"": _UNIFIED, "own keys and values": _UNIFIED | {"attention_k_eq_v": False}},
    "gpt_oss": {
        "": YARN,
        "without windows": YARN | FULL,
        "without biases": YARN | {"attention_bias": False},
        "plain rotations": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    },
    "granite_swa": {"": _SWA_SCALED, "without rotations in full layers": _SWA | {"layer_rope_theta": [0, 1e4] * 2}},
    "granitemoe_swa": {"": _SWA_SCALED, "without shared experts": _SWA | {"shared_intermediate_size": 0}},
    "mimo_v2_flash": {
        "": _MIMO,
        "values as large as keys": _MIMO | {"v_head_dim": 24},
        "windows only": _MIMO | {"layer_types": ["sliding_attention"] * 4},
    },
    "ministral": {"": ALTERNATING, "windows in all layers": {"layer_types": ["sliding_attention"] * 4}},
    "mistral": {"": {}, "without windows": NO_WINDOW, "YaRN": NO_WINDOW | YARN},
    "modernbert-decoder": {
        "": {"local_attention": 2 * WINDOW},
        "biases": BIASED | {"mlp_bias": True, "norm_bias": True},
    },
    "moshi": {"": {"sliding_window": 128, "ffn_dim": 192}, "windows": {"ffn_dim": 192}},
    "olmo3": {"": {}, "YaRN": YARN},
    "vaultgemma": {"": {}, "low caps": UNTIED | _LOW_CAPS},
}
