"""Small random checkpoints with mixtures of experts, whose biases and sinks are not zero."""

from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.engine.families import GROUPED, WINDOWED

_QWEN = GROUPED | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True}
_GPT = WINDOWED | {"num_local_experts": 8, "num_experts_per_tok": 4, "intermediate_size": 48, "attention_bias": True}
# Products of two gated values grow fast with larger weights, and roundings with them.
_SMALLER = {"initializer_range": 0.15}
_LAYERS = {"layer_types": ["sliding_attention", "full_attention"] * 2}


class ExpertModel(NamedTuple):
    """A family of transformers with experts."""

    name: str
    config: dict[str, Any]


EXPERT_MODELS = {
    "qwen3_moe": ExpertModel("qwen3_moe", _QWEN),
    "qwen3_moe with dense layers": ExpertModel(
        "qwen3_moe", _QWEN | {"mlp_only_layers": [1], "norm_topk_prob": False, "attention_bias": True}
    ),
    "gpt_oss": ExpertModel("gpt_oss", _GPT | _LAYERS | _SMALLER),
}


def write_expert_model(model: ExpertModel, folder: Path) -> Path:
    """Write a random checkpoint in bfloat16, whose values all references share."""
    torch.manual_seed(5)
    made = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model.name](**deepcopy(model.config)))
    with torch.no_grad():
        for name, weights in made.named_parameters():
            if name.endswith(("bias", "sinks")):
                weights.normal_(std=1.0 if name.endswith("sinks") else 0.3)
    made.to(torch.bfloat16).save_pretrained(folder)
    return folder


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the distance of logits `[rows, vocabulary]` relative to their spread: the median over the rows."""
    return float(((found - expected).square().mean(dim=1).sqrt() / expected.std(dim=1)).median())
