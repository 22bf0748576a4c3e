"""The shape of the KV cache that a configuration declares: what the probe of the loaded model would find."""

from typing import Any

from engine.attention.cache import CacheGeometry, LayerShape
from engine.attention.llama_shape import head_size

# KV heads of a kind of layers, in those that the configuration has, where transformers' class multiplies them.
_MULTIPLES = {("mimo_v2_flash", "sliding_attention"): 2}


def declared_geometry(config: Any) -> CacheGeometry:
    """Return the shape of K and V of each layer of a text configuration. Raises AttributeError if it lacks numbers."""
    kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    layers = zip(kinds, config.per_layer_config, strict=False)
    return CacheGeometry(
        tuple(
            _layer(one, _MULTIPLES.get((config.model_type, kind), 1))._replace(
                window=chunk or _window(config, kind), chunked=bool(chunk)
            )
            for (kind, one), chunk in zip(layers, chunks_of(config), strict=False)
        )
    )


def chunks_of(config: Any) -> list[int]:
    """Return the tokens of the chunks in which each layer attends, 0 for layers without chunks."""
    kinds = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    return [config.attention_chunk_size or 0 if kind == "chunked_attention" else 0 for kind in kinds]


def _window(config: Any, kind: str) -> int:
    """Return the window of a layer's kind, 0 without one. Without kinds, all layers have the configuration's."""
    if kind not in ("", "sliding_attention"):
        return 0
    return effective_window(config, getattr(config, "sliding_window", None))


def effective_window(config: Any, window: int | None) -> int:
    """Return a window of tokens, 0 if there is none or the context ends in it: some types then do not name it."""
    context = getattr(config, "max_position_embeddings", None)
    return window if window and not (isinstance(context, int) and context <= window) else 0


def _layer(config: Any, multiple: int) -> LayerShape:
    heads: int = config.num_attention_heads
    value_size = getattr(config, "v_head_dim", None)
    if rotated := getattr(config, "qk_rope_head_dim", None):
        # Multi-head latent attention, expanded: each head has its own K and V.
        return LayerShape(heads, config.qk_nope_head_dim + rotated, value_size or head_size(config))
    size = head_size(config)
    return LayerShape(_kv_heads(config, heads) * multiple, size, value_size or size)


def _kv_heads(config: Any, heads: int) -> int:
    if hasattr(config, "multi_query"):
        return 1 if config.multi_query else heads
    if config.model_type == "jetmoe":  # each of a token's experts has its own K and V
        return int(config.num_key_value_heads * config.num_experts_per_tok)
    return getattr(config, "num_key_value_heads", None) or heads


def latent_elements(config: Any) -> int:
    """Return the elements of a token's latents and rotated keys in all layers, 0 without latent attention.

    That is what the cache would have if K and V were not expanded (DeepSeek-V2, 2024, section 2.1).
    """
    latent = getattr(config, "kv_lora_rank", None)
    return int(config.num_hidden_layers * (latent + config.qk_rope_head_dim)) if latent else 0
