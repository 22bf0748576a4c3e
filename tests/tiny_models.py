"""Tiny randomly initialised checkpoints: real architectures, real tokenizers, milliseconds a step."""

import json
import os
from pathlib import Path

import pytest
import tokenizers
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from tests.at_speed import SMALLEST_MODELS

# See tests/at_speed.py.
LAYERS = 1 if os.environ.get(SMALLEST_MODELS) else 3

usual_size = pytest.mark.skipif(LAYERS != 3, reason="its figures are those of the tiny models at their usual size")

VOCABULARY = 384
CONTEXT = 2048
LONG_CONTEXT = 131_072

# Weights this wide make greedy choices clear: with the usual 0.02 a random model's logits are nearly equal.
_SPREAD = 0.3

_CHAT_TEMPLATE = (
    "{% if messages[0].role == 'critic' %}{{ raise_exception('No critic may begin.') }}{% endif %}"
    "{% if tools %}<|tools|>{{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

_TRAINING_LINES = [
    "The quick brown fox jumps over the lazy dog, again and again.",
    "Blocks of keys and values are kept like pages of memory.",
    "Größe, naïve, 北京, 東京, 🙂🚀, Ελληνικά, кириллица",
]


def make_tiny_model(family: str, folder: Path) -> Path:
    """Write a checkpoint of one of `_MODELS`, always the same weights, and return its folder."""
    torch.manual_seed(7)
    model = _MODELS[family]()
    model.generation_config.eos_token_id = 0
    model.generation_config.pad_token_id = 0
    model.save_pretrained(folder)
    _write_tokenizer(folder)
    return folder


def _llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=96,
            intermediate_size=128,
            num_hidden_layers=LAYERS,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            initializer_range=_SPREAD,
            bos_token_id=1,
            eos_token_id=0,
        )
    )


def _windowed() -> Gemma3ForCausalLM:
    """Make a model whose first layers see a window of 40 tokens: neither whole blocks nor a divisor of anything."""
    layers = max(2, LAYERS)
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            layer_types=["sliding_attention"] * (layers - 1) + ["full_attention"],
            sliding_window=40,
            max_position_embeddings=CONTEXT,
            initializer_range=_SPREAD,
            bos_token_id=1,
            eos_token_id=0,
            pad_token_id=0,
            tie_word_embeddings=False,
        )
    )


def _long_llama() -> LlamaForCausalLM:
    """Make a model with the context and the scaled rotations of Llama 3.1; small, because attention is quadratic."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=LONG_CONTEXT,
            initializer_range=_SPREAD,
            bos_token_id=1,
            eos_token_id=0,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        )
    )


def _gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=64,
            n_layer=LAYERS,
            n_head=4,
            n_positions=CONTEXT,
            initializer_range=_SPREAD,
            bos_token_id=1,
            eos_token_id=0,
        )
    )


def _opt() -> OPTForCausalLM:
    return OPTForCausalLM(
        OPTConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            word_embed_proj_dim=64,
            ffn_dim=96,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            max_position_embeddings=CONTEXT,
            init_std=_SPREAD,
            bos_token_id=1,
            eos_token_id=0,
        )
    )


_MODELS = {"llama": _llama, "gpt2": _gpt2, "opt": _opt, "long-llama": _long_llama, "windowed": _windowed}


def _write_tokenizer(folder: Path) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|end|>", "<|begin|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TRAINING_LINES, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": _CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
