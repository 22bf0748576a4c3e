"""Checks before serving that paged attention can replace the attention of a model.

A model that does not pass its batch to its attention, ignores positions, or uses a special mask would still run, but
return wrong tokens. So a few tokens are run through it, once with masks whose values count the visible tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from blocks import Copy
from engine.attention.backend import Direction, PagedBatch, Scoring
from engine.attention.cache import CacheGeometry
from engine.attention.interface import ATTENTION_NAME, CUSTOM_MASK, paged_attention
from engine.attention.paged_context import PagedContext
from engine.errors import ModelUnsupported
from engine.model.loaded import MAX_CONTEXT_TOKENS
from engine.model.unsupported import NO_KEPT_LOGITS, NO_MASK, explain, unknown_layer

_PROBE_NAME = "quire_probe"
_TOKENS = 8


class _Probe:
    """An attention backend that computes nothing and records the inputs of each layer.

    Raises ModelUnsupported for inputs that do not fit a KV cache.
    """

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int]] = {}
        self.windows: dict[int, int | None] = {}
        self.shown: dict[int, int] = {}
        self.keys: list[torch.Tensor] = []

    def block_shape(self) -> tuple[int, ...]:
        return ()

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, _batch: PagedBatch) -> None:
        if layer in self.shapes:
            raise ModelUnsupported(f"its layer {layer} attends more than once")
        if key.shape != value.shape:
            shapes = f"{_heads_and_size(key)} and {_heads_and_size(value)}"
            raise ModelUnsupported(f"its keys and values differ in heads or head size, {shapes}")
        self.shapes[layer] = _heads_and_size(key)
        self.keys.append(key)

    def attend(self, layer: int, query: torch.Tensor, _batch: PagedBatch, scoring: Scoring) -> torch.Tensor:
        self.windows[layer] = scoring.window
        return query

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        pass

    def swap(self, copies: Sequence[Copy], direction: Direction) -> None:
        pass


def probe(model: Any) -> CacheGeometry:
    """Return the cache geometry of a model, and switch it to paged attention.

    Raises ModelUnsupported if paged attention cannot replace the model's own.
    """
    if fault := unknown_layer(model.config.get_text_config()):
        raise ModelUnsupported(fault)
    try:
        return _probe(model)
    except ModelUnsupported as error:
        raise ModelUnsupported(explain(model, str(error))) from error


def _probe(model: Any) -> CacheGeometry:
    AttentionInterface.register(_PROBE_NAME, _probed_attention)
    AttentionMaskInterface.register(_PROBE_NAME, _described_mask)
    forwards = torch.arange(_TOKENS, device=model.device)
    model.set_attn_implementation(_PROBE_NAME)
    recorded = _run(model, forwards)
    model.set_attn_implementation(ATTENTION_NAME)
    geometry = _geometry(model, recorded)
    _check_masks(model.config.get_text_config(), recorded)
    _check_positions(recorded, _run(model, forwards.flip(0)))
    return geometry


def _run(model: Any, positions: torch.Tensor) -> _Probe:
    """Run a row of tokens through the model as a runner would; each position has the same token in any order."""
    recorded = _Probe()
    paged = PagedContext(recorded, PagedBatch.of((), 1, model.device))
    tokens = positions % model.config.get_text_config().vocab_size
    kept = torch.arange(1, _TOKENS, device=model.device)
    try:
        with torch.inference_mode():
            output = model(
                input_ids=tokens[None], position_ids=positions[None], use_cache=False, logits_to_keep=kept, paged=paged
            )
    except (TypeError, AttributeError, LookupError, RuntimeError, AssertionError) as error:
        raise ModelUnsupported(f"it does not run with paged attention: {str(error).strip()}") from error
    if output.logits.shape[1] != len(kept):
        raise ModelUnsupported(NO_KEPT_LOGITS)
    return recorded


def _geometry(model: Any, recorded: _Probe) -> CacheGeometry:
    layers = model.config.get_text_config().num_hidden_layers
    if sorted(recorded.shapes) != list(range(layers)):
        raise ModelUnsupported(
            f"only {len(recorded.shapes)} of {layers} layers use transformers' attention interface, "
            "so paged attention cannot take their place"
        )
    if len(set(recorded.shapes.values())) != 1:
        raise ModelUnsupported(f"its layers differ in KV heads or head size, {sorted(set(recorded.shapes.values()))}")
    return CacheGeometry(layers, *recorded.shapes[0])


def _check_masks(config: Any, recorded: _Probe) -> None:
    """Compare the visible tokens of each layer's mask with the declared windows.

    transformers' attention uses the mask, paged attention the window argument, and transformers' cache the window of
    the configuration. If they differ, transformers' own results depend on its cache.
    """
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    declared = getattr(config, "sliding_window", None)
    context = _context_tokens(config)
    for layer, kind in enumerate(kinds[: config.num_hidden_layers]):
        shown = recorded.shown[layer]
        for source, window in (
            ("attention is given", recorded.windows[layer]),
            ("cache has", declared if kind == "sliding_attention" else None),
        ):
            if shown != min(window or context, context):
                window_text = "no window" if window is None else f"a window of {window}"
                raise ModelUnsupported(
                    f"the mask of its layer {layer} shows {shown} tokens, but its {source} {window_text}"
                )


def _check_positions(forwards: _Probe, backwards: _Probe) -> None:
    """Compare the same tokens in two orders: results may depend on positions, not on order."""
    tolerance = 1e-3 if forwards.keys[0].dtype == torch.float32 else 5e-2
    for there, back in zip(forwards.keys, backwards.keys, strict=True):
        # The median, because a router near a tie may send a token to another expert.
        if _differences(there, back.flip(0)).median() > tolerance:
            raise ModelUnsupported("it ignores position_ids, or mixes tokens otherwise than by attention")


def _differences(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the relative distance of each token's keys."""
    one, other = one.float().flatten(1), other.float().flatten(1)
    return (one - other).square().sum(1).sqrt() / one.square().sum(1).sqrt().clamp_min(1e-9)


def _probed_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: PagedContext | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Record how many tokens the layer's mask shows, and continue without it."""
    result = paged_attention(module, query, key, value, None, paged=paged, **others)
    assert paged is not None
    assert isinstance(paged.backend, _Probe)
    paged.backend.shown[module.layer_idx] = _tokens_shown(attention_mask)
    return result


def _tokens_shown(mask: torch.Tensor | None) -> int:
    if mask is None:
        raise ModelUnsupported(NO_MASK)
    if mask.dtype != torch.int64:
        raise ModelUnsupported(CUSTOM_MASK)
    shown = int(mask.flatten()[0])
    if shown == 0:
        raise ModelUnsupported(NO_MASK)
    return shown


def _described_mask(
    *, q_length: int, kv_length: int, mask_function: Callable[..., torch.Tensor], config: Any, **_others: Any
) -> torch.Tensor:
    """Return a mask whose elements are the number of visible tokens; 0 if they are no window."""
    context = _context_tokens(config.get_text_config())
    shown = _shown(mask_function, context - 1)
    # With a rule that varies by position, such as chunks, other tokens see another number.
    same = all(_shown(mask_function, token) == min(shown, token + 1) for token in (0, context // 2, context - 2))
    return torch.full((1, 1, q_length, kv_length), shown if same else 0)


def _shown(mask_function: Callable[..., torch.Tensor], token: int) -> int:
    """Count the tokens visible to a token; 0 if they are not the last ones up to itself."""
    nothing = torch.tensor(0)
    keys = torch.arange(token + 2)
    visible = torch.as_tensor(mask_function(nothing, nothing, torch.tensor(token), keys)).expand(len(keys))
    count = int(visible.sum())
    return 0 if visible[-1] or not visible[token + 1 - count : -1].all() else count


def _context_tokens(config: Any) -> int:
    # Models without the number are rejected later, with that reason.
    return min(int(getattr(config, "max_position_embeddings", _TOKENS)), MAX_CONTEXT_TOKENS)


def _heads_and_size(part: torch.Tensor) -> tuple[int, int]:
    return (part.shape[1], part.shape[2])
