"""Small random image-text checkpoints: the types whose text part is served, with tiny vision towers."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from tests.engine.families import GROUPED, UNTIED, WINDOWED

ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"] * 2}
THREE_ROWS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
TOWER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
CLIP = TOWER | {"model_type": "clip_vision_model", "projection_dim": 16}
SIGLIP = TOWER | {"model_type": "siglip_vision_model"}
PIXTRAL = TOWER | {"model_type": "pixtral"}
SQUARES = TOWER | {"image_size": [16, 16], "patch_size": [8, 8]}
QWEN2_TOWER = {"depth": 1, "embed_dim": 16, "hidden_size": 64, "num_heads": 2, "patch_size": 8}
QWEN_TOWER = QWEN2_TOWER | {"hidden_size": 16, "out_hidden_size": 64, "intermediate_size": 32}
QWEN3_TOWER = QWEN_TOWER | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
SAM = {"hidden_size": 16, "output_channels": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_dim": 16}
PERCEIVER = {"hidden_size": 64, "resampler_n_latents": 2, "resampler_depth": 1, "resampler_n_heads": 4}
CODEBOOK = {"embed_dim": 4, "num_embeddings": 8, "base_channels": 32, "latent_channels": 32, "channel_multiplier": [1]}
GLM_MARKS = {"image_start_token_id": 11, "image_end_token_id": 12} | {
    "video_start_token_id": 13,
    "video_end_token_id": 14,
}
QWEN_MARKS = {"vision_start_token_id": 11, "vision_end_token_id": 12}
QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GLM_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
HALF_ROTATED = {"rope_parameters": THREE_ROWS["rope_parameters"] | {"mrope_section": [1, 1, 2]}}
EXPERTS = {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1}


def _of(text_type: str, text: dict[str, Any], tower: dict[str, Any], **others: Any) -> dict[str, Any]:
    """Return a configuration whose tokens for images are ordinary ones of the small vocabulary."""
    marks = {f"{kind}_token_{name}": token for kind, token in (("image", 9), ("video", 10)) for name in ("id", "index")}
    return marks | others | {"text_config": text | {"model_type": text_type}, "vision_config": tower}


IMAGE_TEXT: dict[str, dict[str, Any]] = {
    "aria": _of("aria_text", GROUPED | EXPERTS, TOWER | {"model_type": "idefics3_vision"}),
    "aya_vision": _of("cohere2", WINDOWED, SIGLIP, downsample_factor=1),
    "cohere2_vision": _of("cohere2", WINDOWED, SIGLIP, downsample_factor=1, alignment_intermediate_size=32),
    "deepseek_vl": _of("llama", GROUPED, SIGLIP),
    "exaone4_5": _of("exaone4", WINDOWED | ALTERNATING, QWEN_TOWER | {"num_key_value_heads": 2}),
    "gemma3": _of("gemma3_text", WINDOWED | UNTIED, SIGLIP, mm_tokens_per_image=4) | UNTIED,
    "glm46v": _of("glm4v_text", GROUPED | THREE_ROWS, QWEN_TOWER | {"image_size": 16}, **GLM_MARKS),
    "glm4v": _of("glm4v_text", GROUPED | THREE_ROWS, QWEN_TOWER | {"image_size": 16}, **GLM_MARKS),
    "glm4v_moe": _of(
        "glm4v_moe_text", GROUPED | HALF_ROTATED | GLM_EXPERTS, QWEN_TOWER | {"image_size": 16}, **GLM_MARKS
    ),
    "got_ocr2": _of("qwen2", GROUPED, SAM | {"image_size": 32, "window_size": 2, "global_attn_indexes": [0]}),
    "idefics2": _of("mistral", WINDOWED, TOWER, perceiver_config=PERCEIVER | {"num_key_value_heads": 2}),
    "idefics3": _of("llama", GROUPED, TOWER, scale_factor=1),
    "internvl": _of("qwen2", GROUPED, SQUARES),
    "janus": _of("llama", GROUPED, TOWER | {"model_type": "janus_vision_model", "projection_dim": 64})
    | {"vq_config": CODEBOOK | {"num_res_blocks": 1, "projection_dim": 64, "image_token_embed_dim": 16}},
    "lighton_ocr": _of("qwen3", GROUPED, PIXTRAL),
    "llava": _of("llama", GROUPED, CLIP),
    "llava_next": _of("mistral", WINDOWED, CLIP),
    "llava_next_video": _of("llama", GROUPED, CLIP),
    "llava_onevision": _of("qwen2", GROUPED, SIGLIP),
    "mistral3": _of("mistral", GROUPED, PIXTRAL),
    "mistral3 with ministral3": _of("ministral3", GROUPED, PIXTRAL),
    "ovis2": _of("qwen2", GROUPED, TOWER | {"vocab_size": 32}, hidden_size=64, vocab_size=384)
    | {"visual_indicator_token_ids": [11, 12, 13, 14, 15]},
    "paligemma": _of("gemma", GROUPED, SIGLIP | {"projection_dim": 64}, projection_dim=64),
    "qwen2_5_vl": _of("qwen2_5_vl_text", GROUPED | THREE_ROWS, QWEN_TOWER, **QWEN_MARKS),
    "qwen2_vl": _of("qwen2_vl_text", GROUPED | THREE_ROWS, QWEN2_TOWER, **QWEN_MARKS),
    "qwen2_vl with windows": _of(
        "qwen2_vl_text",
        WINDOWED | THREE_ROWS | {"use_sliding_window": True, "max_window_layers": 2},
        QWEN2_TOWER,
        **QWEN_MARKS,
    ),
    "qwen3_vl": _of("qwen3_vl_text", GROUPED | THREE_ROWS, QWEN3_TOWER, **QWEN_MARKS),
    "qwen3_vl_moe": _of("qwen3_vl_moe_text", GROUPED | THREE_ROWS | QWEN_EXPERTS, QWEN3_TOWER, **QWEN_MARKS),
    "smolvlm": _of("llama", GROUPED, TOWER, scale_factor=1),
    "video_llama_3": _of("qwen2", GROUPED, TOWER),
    "video_llava": _of("llama", GROUPED, CLIP),
    "vipllava": _of("llama", GROUPED, CLIP | {"num_hidden_layers": 2}, vision_feature_layers=[-1, 0]),
}


def model_type_of(case: str) -> str:
    """Return the model type of a case, which its name starts with."""
    return case.partition(" ")[0]


def write_image_text(case: str, folder: Path, **changed: Any) -> None:
    """Write a random checkpoint of a case, as transformers saves it; `changed` are fields of the configuration."""
    torch.manual_seed(3)
    config = CONFIG_MAPPING[model_type_of(case)](**deepcopy(IMAGE_TEXT[case] | changed))
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
