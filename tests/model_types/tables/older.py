"""Older decoders with positions of their own, encoders as decoders, and the decoders of encoder-decoder models."""

from tests.model_types.sizes import HALF_ROTATED, UNTIED, Fields, Table

_DECODER: Fields = {"is_decoder": True}
_GPT: Fields = {"n_inner": 96}
_ENCODER_DECODER: Fields = {"decoder_start_token_id": 1, "forced_eos_token_id": None}
_TOWER: Fields = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_SAM: Fields = {
    "hidden_size": 16,
    "output_channels": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "mlp_dim": 16,
    "image_size": 32,
    "window_size": 2,
    "global_attn_indexes": [0],
}
_BLT: Fields = {"vocab_size": 300, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}
_BLT_PART = _BLT | {"num_hidden_layers": 1, "max_position_embeddings": 128}
_CODEBOOK: Fields = {
    "codebook_size": 8,
    "embed_dim": 4,
    "base_channels": 32,
    "latent_channels": 4,
    "channel_multiplier": [1],
    "num_res_blocks": 1,
    "hidden_size": 32,
}


def _as_decoder(**fields: int) -> dict[str, Fields]:
    """Return an encoder as published, and as the decoder that its class can be."""
    return {"": dict(fields), "as a decoder": _DECODER | UNTIED | fields}


OLDER: Table = {
    "bart": {"": _ENCODER_DECODER},
    "bert": _as_decoder(),
    "bert-generation": _as_decoder(),
    "big_bird": {"": {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1}}
    | {"as a decoder": _DECODER | {"attention_type": "original_full"}},
    "bigbird_pegasus": {"": _ENCODER_DECODER | {"attention_type": "original_full"}},
    "biogpt": {"": {}, "untied head": UNTIED},
    "blenderbot": {"": _ENCODER_DECODER},
    "blenderbot-small": {"": _ENCODER_DECODER},
    "bloom": {"": {"seq_length": 128}},
    "blt": {
        "": {
            "patch_in_forward": True,
            "encoder_hash_byte_group_size": [3],
            "encoder_hash_byte_group_vocab": 64,
            "patcher_config": _BLT_PART,
            "encoder_config": _BLT_PART | {"hidden_size_global": 64},
            "decoder_config": _BLT_PART | {"hidden_size_global": 64},
            "global_config": _BLT_PART,
        }
    },
    "camembert": _as_decoder(),
    "codegen": {"": _GPT | {"rotary_dim": 8}},
    "cpmant": {
        "": {"dim_head": 16, "dim_ff": 96, "position_bias_num_buckets": 32, "prompt_length": 4, "init_std": 0.3}
    },
    "ctrl": {"": {"dff": 96}, "untied head": {"dff": 96} | UNTIED},
    "data2vec-text": _as_decoder(),
    "doge": {"": {"num_key_value_heads": 2, "keep_window_size": 16, "sliding_window": None}},
    "electra": _as_decoder(embedding_size=32),
    "emu3": {"": {"text_config": {"model_type": "emu3_text_model"}, "vq_config": _CODEBOOK}},
    "ernie": _as_decoder(),
    "falcon": {
        "": {},
        "ALiBi": {"alibi": True},
        "grouped heads": {"new_decoder_architecture": True, "num_kv_heads": 2},
    },
    "git": {"": {"vision_config": _TOWER | {"projection_dim": 16}}},
    "got_ocr2": {"": {"text_config": {"model_type": "qwen2"}, "vision_config": _SAM, "image_token_index": 9} | UNTIED},
    "gpt-sw3": {"": _GPT, "untied head": _GPT | UNTIED},
    "gpt2": {
        "": _GPT,
        "untied head": _GPT | UNTIED,
        "scores scaled by layer": _GPT | UNTIED | {"scale_attn_by_inverse_layer_idx": True},
        "scores not scaled": _GPT | UNTIED | {"scale_attn_weights": False},
    },
    "gpt_bigcode": {"": _GPT, "many KV heads": _GPT | {"multi_query": False}, "untied head": _GPT | UNTIED},
    "gpt_neo": {
        "": {"num_layers": 4, "attention_types": [[["global", "local"], 2]], "window_size": 7},
        "global layers": {"num_layers": 4, "attention_types": [[["global"], 4]]},
    },
    "gpt_neox": {
        "": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}},
        "one after the other": HALF_ROTATED | {"use_parallel_residual": False},
        "without biases": HALF_ROTATED | {"attention_bias": False},
        "dynamic rotations": {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}},
    },
    "gpt_neox_japanese": {"": {}},
    "gptj": {"": _GPT | {"rotary_dim": 8}},
    "marian": {"": _ENCODER_DECODER},
    "mbart": {"": _ENCODER_DECODER},
    "megatron-bert": _as_decoder(),
    "mllama": {
        "": {
            "text_config": {"model_type": "mllama_text_model", "cross_attention_layers": [1], "pad_token_id": 0},
            "vision_config": _TOWER
            | {"vision_output_dim": 32, "intermediate_layers_indices": [0]}
            | {"supported_aspect_ratios": [[1, 1]], "num_global_layers": 1, "attention_heads": 2},
            "image_token_index": 9,
        }
    },
    "mpt": {
        "": {"expansion_ratio": 2, "max_seq_len": 128},
        "learned positions": {"expansion_ratio": 2, "max_seq_len": 128, "attn_config": {"alibi": False}},
    },
    "musicgen": {"": {}},
    "musicgen_melody": {"": {}},
    "mvp": {"": _ENCODER_DECODER},
    "openai-gpt": {"": {}},
    "opt": {
        "": {"word_embed_proj_dim": 64},
        "projections": {"word_embed_proj_dim": 32},
        "norms behind": {"word_embed_proj_dim": 32, "do_layer_norm_before": False} | UNTIED,
        "untied head": {"word_embed_proj_dim": 64, "enable_bias": False} | UNTIED,
    },
    "pegasus": {"": _ENCODER_DECODER},
    "phi4_multimodal": {
        "": {
            "sliding_window": None,
            "vision_config": _TOWER | {"crop_size": 16, "image_token_id": 9},
            "audio_config": {"hidden_size": 16, "intermediate_size": 16, "num_blocks": 1, "num_attention_heads": 2}
            | {"ext_pw_out_channel": 16, "depthwise_separable_out_channel": 16, "nemo_conv_channels": 16}
            | {"audio_token_id": 10, "input_size": 16},
        }
    },
    "plbart": {"": _ENCODER_DECODER},
    "prophetnet": {
        "": {
            "num_encoder_layers": 4,
            "num_decoder_layers": 4,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
        }
    },
    "reformer": {
        "": {
            "is_decoder": True,
            "attn_layers": ["local", "lsh"] * 2,
            "attention_head_size": 16,
            "feed_forward_size": 96,
            "axial_pos_shape": [8, 16],
            "axial_pos_embds_dim": [16, 48],
            "local_attn_chunk_length": 8,
            "lsh_attn_chunk_length": 8,
            "num_buckets": 4,
            "hash_seed": 1,
        }
    },
    "rembert": _as_decoder(input_embedding_size=32, output_embedding_size=48),
    "roberta": _as_decoder(),
    "roberta-prelayernorm": _as_decoder(),
    "roc_bert": _as_decoder(
        pronunciation_embed_dim=16, pronunciation_vocab_size=32, shape_embed_dim=16, shape_vocab_size=32
    ),
    "roformer": _as_decoder(embedding_size=32),
    "trocr": {"": {}},
    "whisper": {"": {"num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 128}},
    "xglm": {"": {"attention_heads": 4}},
    "xlm": {"": {"emb_dim": 64, "n_layers": 4, "n_heads": 4}, "causal": {"causal": True, "n_heads": 4}},
    "xlm-roberta": _as_decoder(),
    "xlm-roberta-xl": _as_decoder(),
    "xlnet": {"": {"d_inner": 96, "n_layer": 4, "n_head": 4, "d_head": 16}},
    "xmod": {"": {"languages": ["en_XX"], "default_language": "en_XX"}}
    | {"as a decoder": _DECODER | UNTIED | {"languages": ["en_XX"], "default_language": "en_XX"}},
}
