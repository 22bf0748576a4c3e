"""Finds out, before a model serves anybody, whether paged attention computes what the model means.

A model that keeps its batch from its attention, ignores positions, or masks by a rule of its own would still run, and
give wrong tokens. So a few tokens are sent through it, once with masks that say what they would hide.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from blocks import Copy
from engine.attention.backend import Direction, PagedBatch, Scoring
from engine.attention.cache import CacheGeometry
from engine.attention.interface import ATTENTION_NAME, MASK_OF_ITS_OWN, PagedContext, paged_attention
from engine.errors import ModelUnsupported
from engine.model.unsupported import NO_MASK, explain, unknown_layer

_PROBE_NAME = "quire_probe"
_TOKENS = 8


class _Probe:
    """An attention backend that computes nothing, but notes what each layer hands over.

    Raises ModelUnsupported where that has no place in a KV cache.
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
    """Return the cache that a model needs, and leave it with paged attention.

    Raises ModelUnsupported if that cannot take the place of the model's own.
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
    noted = _run(model, forwards)
    model.set_attn_implementation(ATTENTION_NAME)
    geometry = _geometry(model, noted)
    _check_masks(model.config.get_text_config(), noted)
    _check_positions(noted, _run(model, forwards.flip(0)))
    return geometry


def _run(model: Any, positions: torch.Tensor) -> _Probe:
    """Send a row of tokens through the model as a runner would; a position has the same token in any order."""
    noted = _Probe()
    paged = PagedContext(noted, PagedBatch.of((), 1, model.device))
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
        raise ModelUnsupported("its forward call lacks logits_to_keep, so it computes logits for every token")
    return noted


def _geometry(model: Any, noted: _Probe) -> CacheGeometry:
    layers = model.config.get_text_config().num_hidden_layers
    if sorted(noted.shapes) != list(range(layers)):
        raise ModelUnsupported(
            f"only {len(noted.shapes)} of {layers} layers use transformers' attention interface, "
            "so paged attention cannot take their place"
        )
    if len(set(noted.shapes.values())) != 1:
        raise ModelUnsupported(f"its layers differ in KV heads or head size, {sorted(set(noted.shapes.values()))}")
    return CacheGeometry(layers, *noted.shapes[0])


def _check_masks(config: Any, noted: _Probe) -> None:
    """Compare what each layer's mask shows with the windows that are meant to say the same.

    transformers' own attention heeds the mask, paged attention the window that it is given, and transformers' cache the
    window of the configuration. Where they differ, transformers itself answers otherwise without its cache.
    """
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    declared = getattr(config, "sliding_window", None)
    context = _context_tokens(config)
    for layer, kind in enumerate(kinds[: config.num_hidden_layers]):
        shown = noted.shown[layer]
        for who, window in (
            ("attention is given", noted.windows[layer]),
            ("cache has", declared if kind == "sliding_attention" else None),
        ):
            if shown != min(window or context, context):
                said = "no window" if window is None else f"a window of {window}"
                raise ModelUnsupported(f"the mask of its layer {layer} shows {shown} tokens, but its {who} {said}")


def _check_positions(forwards: _Probe, backwards: _Probe) -> None:
    """Compare the same tokens sent in two orders: results may depend on their positions, not on their order."""
    tolerance = 1e-3 if forwards.keys[0].dtype == torch.float32 else 5e-2
    for there, back in zip(forwards.keys, backwards.keys, strict=True):
        # The median: where a router is of two minds, a token may well take another expert.
        if _differences(there, back.flip(0)).median() > tolerance:
            raise ModelUnsupported("it ignores position_ids, or mixes tokens otherwise than by attention")


def _differences(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return how far each token's keys are apart, relative to their size."""
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
    """Note how many tokens the layer's mask shows, and go on without it."""
    result = paged_attention(module, query, key, value, None, paged=paged, **others)
    assert paged is not None
    assert isinstance(paged.backend, _Probe)
    paged.backend.shown[module.layer_idx] = _tokens_shown(attention_mask)
    return result


def _tokens_shown(mask: torch.Tensor | None) -> int:
    if mask is None:
        raise ModelUnsupported(NO_MASK)
    if mask.dtype != torch.int64:
        raise ModelUnsupported(MASK_OF_ITS_OWN)
    shown = int(mask.flatten()[0])
    if shown == 0:
        raise ModelUnsupported(NO_MASK)
    return shown


def _described_mask(
    *, q_length: int, kv_length: int, mask_function: Callable[..., torch.Tensor], config: Any, **_others: Any
) -> torch.Tensor:
    """Make a mask that says in every element how many tokens a token sees; 0 where that is no window."""
    context = _context_tokens(config.get_text_config())
    shown = _shown(mask_function, context - 1)
    # A rule that is not the same everywhere, such as one of chunks, shows others another number.
    same = all(_shown(mask_function, token) == min(shown, token + 1) for token in (0, context // 2, context - 2))
    return torch.full((1, 1, q_length, kv_length), shown if same else 0)


def _shown(mask_function: Callable[..., torch.Tensor], token: int) -> int:
    """Count the tokens that a mask shows to a token; 0 if they are not the last ones up to itself."""
    nothing = torch.tensor(0)
    keys = torch.arange(token + 2)
    visible = torch.as_tensor(mask_function(nothing, nothing, torch.tensor(token), keys)).expand(len(keys))
    count = int(visible.sum())
    return 0 if visible[-1] or not visible[token + 1 - count : -1].all() else count


def _context_tokens(config: Any) -> int:
    # Models without the number are refused later, with that reason.
    return int(getattr(config, "max_position_embeddings", _TOKENS))


def _heads_and_size(part: torch.Tensor) -> tuple[int, int]:
    return (part.shape[1], part.shape[2])
