"""Decoders whose layers all attend to the whole text, without experts."""

from tests.model_types.sizes import (
    BIASED,
    DYNAMIC,
    HALF_ROTATED,
    LATER_WINDOWS,
    LINEAR,
    LLAMA3,
    NO_WINDOW,
    ONE_KV_HEAD,
    TIED,
    UNTIED,
    YARN,
    Table,
    long_rotations,
    rotations,
)

_SCALED = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2}
_GRANITE = _SCALED | {"logits_scaling": 4.0}
_SCALED_BY_POSITION = rotations(
    "yarn",
    theta=1000000.0,
    factor=4.0,
    beta_fast=32.0,
    beta_slow=1.0,
    mscale=1.0,
    mscale_all_dim=1.0,
    original_max_position_embeddings=16,
    llama_4_scaling_beta=0.1,
)
_AUDIO = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}

DENSE: Table = {
    "apertus": {"": LLAMA3},
    "arcee": {"": YARN},
    "bitnet": {"": {}},
    "cohere": {"": {}, "normalized queries and keys": {"use_qk_norm": True}, "logits scaled up": {"logit_scale": 0.5}},
    "diffllama": {"": {"head_dim": None}},
    "ernie4_5": {"": {}, "biases": {"use_bias": True}},
    "fuyu": {"": {"text_config": {"model_type": "persimmon"}, "patch_size": 2, "image_size": 4}},
    "gemma": {"": {}, "one KV head": ONE_KV_HEAD},
    "glm": {"": HALF_ROTATED},
    "glm4": {"": HALF_ROTATED},
    "granite": {"": _GRANITE, "biases": _GRANITE | BIASED | {"mlp_bias": True}, "tied head": _GRANITE | TIED},
    "helium": {"": {}},
    "hrm_text": {"": {"num_hidden_layers": 2}},
    "hunyuan_v1_dense": {"": {}, "dynamic rotations": rotations("dynamic", factor=4.0, alpha=1000.0)},
    "hyperclovax": {"": _SCALED | {"logits_scaling": 2.0}, "without norms behind": {"use_post_norm": False}},
    "internlm3": {"": {}, "biases": BIASED | {"mlp_bias": True}, "dynamic rotations": DYNAMIC},
    "iquestcoder": {"": {}},
    "jais2": {"": {}},
    "llama": {
        "": {},
        "rotations of Llama 3.1": LLAMA3,
        "linear rotations": LINEAR,
        "dynamic rotations": DYNAMIC,
        "YaRN": YARN,
        "tied head": TIED,
        "biases": BIASED | {"mlp_bias": True},
        "one KV head": ONE_KV_HEAD,
        "large heads": {"head_dim": 32},
    },
    "ministral3": {"": _SCALED_BY_POSITION | NO_WINDOW, "plain rotations": NO_WINDOW, "windows": {}},
    "moss_transcribe_diarize": {
        "": {"text_config": {"model_type": "qwen3"}, "audio_config": _AUDIO, "audio_token_id": 9}
    },
    "nanochat": {"": {}, "low softcap": {"final_logit_softcapping": 5.0}},
    "nemotron": {"": HALF_ROTATED},
    "olmo": {"": {}, "clipped queries, keys and values": {"clip_qkv": 0.5}},
    "olmo2": {"": {}, "YaRN": YARN},
    "persimmon": {"": HALF_ROTATED, "without norms": HALF_ROTATED | {"qk_layernorm": False}},
    "phi": {"": HALF_ROTATED, "normalized queries and keys": HALF_ROTATED | {"qk_layernorm": True}},
    "phi3": {
        "": {"sliding_window": 7},
        "long rotations": long_rotations(16) | {"sliding_window": None},
        "partly rotated": HALF_ROTATED | {"sliding_window": None} | TIED,
    },
    "qwen2": {
        "": {},
        "windows in later layers": LATER_WINDOWS,
        "dynamic rotations": DYNAMIC,
        "YaRN": YARN,
        "tied head": TIED,
    },
    "qwen3": {
        "": {},
        "windows in later layers": LATER_WINDOWS,
        "YaRN": YARN,
        "tied head": TIED,
        "biases": BIASED,
    },
    "seed_oss": {"": {}},
    "smollm3": {
        "": UNTIED,
        "windows without rotations": UNTIED | {"use_sliding_window": True},
    },
    "stablelm": {
        "": {"partial_rotary_factor": 0.25},
        "parallel, normalized": {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True},
    },
    "starcoder2": {"": {}, "without windows": {"sliding_window": None}, "untied head": UNTIED},
}
