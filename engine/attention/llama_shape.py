"""Properties of Llama-shaped models, for decoders that replace the model's modules.

A layer is: norm, attention, norm, gated SiLU; optionally with biases of q, k and v, norms of q and k, and windows.

Other models have the same layers with mixtures of experts in place of the last part, sinks, and a bias of the
attention's output.
"""

from dataclasses import dataclass
from typing import Any

import torch

_KINDS = frozenset({"llama", "mistral", "qwen2", "qwen3"})
_MIXTURES = frozenset({"qwen3_moe", "gpt_oss"})
# Rotations of a position that do not depend on the length of the sequence.
_FIXED_ROTATIONS = frozenset({"default", "linear", "llama3", "yarn"})


@dataclass(frozen=True)
class ExpertsShape:
    """Mixtures of experts, in place of the gated SiLU of some `layers`.

    A router scores `count` experts for each token, and the `chosen` ones with the largest scores each compute a gated
    product of `intermediate` elements. Their results are weighted by the softmax of the chosen scores, with `of_all` by
    the chosen parts of the softmax of all scores.

    Gates are gated SiLU, or with a `limit` those of GPT-OSS, (up + 1) * gate * sigmoid(alpha * gate): the gate is at
    most `limit`, and up within it on both sides.
    """

    layers: tuple[bool, ...]
    count: int
    chosen: int
    intermediate: int
    of_all: bool
    limit: float = 0.0
    alpha: float = 0.0

    @classmethod
    def of(cls, model: Any) -> "ExpertsShape | None":
        """Read the shape from transformers' model, None if it has no experts."""
        config = model.config
        if config.model_type not in _MIXTURES:
            return None
        layers = tuple(hasattr(layer.mlp, "experts") for layer in model.model.layers)
        sizes = layers, config.num_local_experts, config.num_experts_per_tok
        if config.model_type == "gpt_oss":
            return cls(*sizes, config.intermediate_size, False, config.swiglu_limit, config.swiglu_alpha)
        return cls(*sizes, config.moe_intermediate_size, not config.norm_topk_prob)


@dataclass(frozen=True)
class LlamaShape:
    """The numbers of a Llama-shaped model.

    `windows` has the sliding window of each layer, 0 without one. A position rotates the elements i and i + head_size
    / 2 of a head by `frequencies[i]` times the position (RoPE, Su et al. 2021); sines and cosines are multiplied by
    `rotation_scaling`.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int
    epsilon: float
    scaling: float
    windows: tuple[int, ...]
    frequencies: tuple[float, ...]
    rotation_scaling: float
    experts: ExpertsShape | None = None

    @classmethod
    def of(cls, model: Any) -> "LlamaShape":
        """Read the shape from transformers' model."""
        config, layers, rotary = model.config, model.model.layers, model.model.rotary_emb
        return cls(
            layers=len(layers),
            hidden=config.hidden_size,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_size=head_size(config),
            intermediate=config.intermediate_size,
            vocabulary=config.vocab_size,
            epsilon=config.rms_norm_eps,
            scaling=layers[0].self_attn.scaling,
            windows=tuple(window_of(layer.self_attn) or 0 for layer in layers),
            frequencies=tuple(rotary.inv_freq.tolist()),
            rotation_scaling=rotary.attention_scaling,
            experts=ExpertsShape.of(model),
        )

    def rotations(self, context_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `[context_tokens, head_size / 2]` float32 cosines and sines of the angles of each position."""
        angles = torch.outer(torch.arange(context_tokens).float(), torch.tensor(self.frequencies))
        return angles.cos() * self.rotation_scaling, angles.sin() * self.rotation_scaling


def is_llama_shaped(model: Any) -> bool:
    """Return whether a model consists of such layers only, without further features."""
    return (
        _has_layers_of(model.config, _KINDS)
        and not getattr(model.config, "mlp_bias", False)
        and all(layer.self_attn.o_proj.bias is None for layer in model.model.layers)
    )


def is_mixture(model: Any) -> bool:
    """Return whether a model consists of such layers, some or all with mixtures of experts."""
    return _has_layers_of(model.config, _MIXTURES)


def _has_layers_of(config: Any, kinds: frozenset[str]) -> bool:
    rotation = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    return config.model_type in kinds and rotation in _FIXED_ROTATIONS and getattr(config, "hidden_act", None) == "silu"


def fused_parts(config: Any) -> list[tuple[str, ...]]:
    """Return the names of the matrices that a decoder multiplies as one, by layer: q, k and v; gate and up."""
    if config.model_type not in _KINDS:
        return []
    parts = ("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj"))
    return [
        tuple(f"model.layers.{layer}.{module}.{name}.weight" for name in names)
        for layer in range(config.num_hidden_layers)
        for module, names in parts
    ]


def head_size(config: Any) -> int:
    """Return the number of elements of a head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def window_of(attention: Any) -> int | None:
    """Return the sliding window of a layer's attention, None without one."""
    # Each layer has its window if layers differ; otherwise the configuration has it.
    window: int | None = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
    return window or None


def rotations(model: Any, context_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `[context_tokens, head_size / 2]` float32 cosines and sines of the angles of each position.

    They rotate the elements i and i + head_size / 2 of a head (RoPE, Su et al. 2021); scaling of the rotation is
    included.
    """
    positions = torch.arange(context_tokens, device=model.device)[None]
    cosine, sine = model.model.rotary_emb(torch.zeros(1, dtype=torch.float32, device=model.device), positions)
    half = head_size(model.config) // 2
    return cosine[0, :, :half].float(), sine[0, :, :half].float()
