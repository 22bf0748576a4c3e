"""Checks before serving that paged attention can replace the attention of a model.

A model that does not pass its batch to its attention, computes with the places of tokens in a row instead of their
positions, or uses a special mask would still run, but return wrong tokens. So a few tokens are run through it in
several orders: queries, keys, values and logits of each token have to be the same, at the start of the context and near
its end. Masks have values that count the visible tokens.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import AttentionInterface, Cache
from transformers.masking_utils import AttentionMaskInterface

from blocks import Copy
from engine.attention.backend import Direction, PagedBatch, Scoring
from engine.attention.cache import CacheGeometry, LayerShape
from engine.attention.declared_geometry import chunks_of, effective_window
from engine.attention.interface import ATTENTION_NAME, CUSTOM_MASK, paged_attention
from engine.attention.paged_context import PagedContext
from engine.errors import ModelUnsupported
from engine.model.decoded_weights import stand_ins
from engine.model.loaded import context_tokens, vocabulary_size
from engine.model.unsupported import NO_KEPT_LOGITS, NO_MASK, explain, unknown_layer

_PROBE_NAME = "quire_probe"
_TOKENS = 8
_MIXES = "it ignores position_ids, or mixes tokens otherwise than by attention"
_COUNTS = "it computes with the number of cached tokens, which is not a token's position when sequences share a step"


class _Probe:
    """An attention backend that computes nothing and records the inputs of each layer.

    Raises ModelUnsupported for inputs that do not fit a KV cache.
    """

    def __init__(self) -> None:
        self.shapes: dict[int, LayerShape] = {}
        self.windows: dict[int, int | None] = {}
        self.shown: dict[int, int] = {}
        # Of each token, in the order of the forward call: keys, values and queries of each layer; then the logits.
        self.computed: list[torch.Tensor] = []

    def part_shape(self, kv_heads: int, size: int) -> tuple[int, ...]:
        return (kv_heads, size)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, _batch: PagedBatch) -> None:
        if layer in self.shapes:
            raise ModelUnsupported(f"its layer {layer} attends more than once")
        if key.shape[1] != value.shape[1]:
            raise ModelUnsupported(f"its keys and values differ in heads, {key.shape[1]} and {value.shape[1]}")
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[2], value.shape[2])
        self.computed += (key, value)

    def attend(self, layer: int, query: torch.Tensor, _batch: PagedBatch, scoring: Scoring) -> torch.Tensor:
        shape = self.shapes[layer]
        if query.shape[1] % shape.kv_heads or query.shape[2] != shape.key_size:
            raise ModelUnsupported(f"its queries {tuple(query.shape[1:])} do not fit its keys {tuple(shape[:2])}")
        if scoring.sinks is not None and scoring.sinks.shape != query.shape[1:2]:
            raise ModelUnsupported(f"its {query.shape[1]} heads have sinks of shape {tuple(scoring.sinks.shape)}")
        self.windows[layer] = scoring.window
        self.computed.append(query)
        # Something of the token's own: what acts on queries then is also in the layers after this.
        return pad(query, (0, shape.value_size - shape.key_size))

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
        with stand_ins(model):
            return _probe(model)
    except ModelUnsupported as error:
        raise ModelUnsupported(explain(model, str(error))) from error


def _probe(model: Any) -> CacheGeometry:
    AttentionInterface.register(_PROBE_NAME, _probed_attention)
    AttentionMaskInterface.register(_PROBE_NAME, _described_mask)
    model.set_attn_implementation(_PROBE_NAME)
    recorded = _run(model, torch.arange(_TOKENS))
    model.set_attn_implementation(ATTENTION_NAME)
    geometry = _geometry(model, recorded)
    _check_masks(model.config.get_text_config(), recorded)
    _check_orders(model, recorded)
    return geometry


def _check_orders(model: Any, forwards: _Probe) -> None:
    """Compare the same tokens in other orders: results may depend on positions, not on places in a row."""
    backwards = torch.arange(_TOKENS).flip(0)
    _check_equal(forwards, _run(model, backwards), backwards, _MIXES)
    last = _context_tokens(model.config.get_text_config())
    positions = torch.arange(max(0, last - _TOKENS), last)
    expected = _run(model, positions)
    # A prompt in two pieces, of which the second one comes first in the row.
    pieces = torch.arange(len(positions)).roll(len(positions) // 2)
    _check_equal(expected, _run(model, positions[pieces]), pieces, _MIXES)
    if cached := _run_cached(model, positions):
        _check_equal(expected, cached, torch.arange(len(positions)), _COUNTS)


class _LongCache(Cache):  # type: ignore[misc]  # transformers has no types
    """Declares that it holds the tokens before a position, and returns only what is given to it.

    A model may compute with its length in place of positions, and a paged forward call has no such cache.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__(layers=[])
        self._tokens = tokens

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        return key_states, value_states

    def get_seq_length(self, *_: Any, **__: Any) -> int:
        return self._tokens

    def get_mask_sizes(self, query_length: Any, *_: Any) -> tuple[int, int]:
        fed = query_length if isinstance(query_length, int) else len(query_length)
        return self._tokens + fed, 0


def _run_cached(model: Any, positions: torch.Tensor) -> _Probe | None:
    """Run tokens behind a long cache; None if the model needs more of a cache than its length."""
    try:
        return _run(model, positions, _LongCache(int(positions[0])))
    except (ModelUnsupported, ValueError):
        return None


def _run(model: Any, positions: torch.Tensor, cache: Cache | None = None) -> _Probe:
    """Run a row of tokens through the model as a runner would; each position has the same token in any order."""
    recorded = _Probe()
    positions = positions.to(model.device)
    paged = PagedContext(recorded, PagedBatch.of((), 1, model.device), positions=positions)
    tokens = positions % vocabulary_size(model.config.get_text_config())
    kept = torch.arange(1, len(positions), device=model.device)
    further = {} if cache is None else {"past_key_values": cache}
    try:
        with torch.inference_mode():
            output = model(
                input_ids=tokens[None],
                position_ids=positions[None],
                use_cache=cache is not None,
                logits_to_keep=kept,
                paged=paged,
                **further,
            )
    except (TypeError, AttributeError, LookupError, RuntimeError, AssertionError) as error:
        raise ModelUnsupported(f"it does not run with paged attention: {str(error).strip()}") from error
    if output.logits.shape[1] != len(kept):
        raise ModelUnsupported(NO_KEPT_LOGITS)
    # The first token's logits were not asked for.
    recorded.computed.append(torch.cat([output.logits[0, :1] * float("nan"), output.logits[0]]))
    return recorded


def _geometry(model: Any, recorded: _Probe) -> CacheGeometry:
    layers = model.config.get_text_config().num_hidden_layers
    if sorted(recorded.shapes) != list(range(layers)):
        raise ModelUnsupported(
            f"only {len(recorded.shapes)} of {layers} layers use transformers' attention interface, "
            "so paged attention cannot take their place"
        )
    config = model.config.get_text_config()
    return CacheGeometry(
        tuple(
            recorded.shapes[layer]._replace(
                window=chunk or effective_window(config, recorded.windows[layer]), chunked=bool(chunk)
            )
            for layer, chunk in enumerate(chunks_of(config)[:layers])
        )
    )


def _check_masks(config: Any, recorded: _Probe) -> None:
    """Compare the visible tokens of each layer's mask with the declared windows.

    transformers' attention uses the mask, paged attention the window argument, and transformers' cache the window of
    the configuration. If they differ, transformers' own results depend on its cache.
    """
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    declared = getattr(config, "sliding_window", None)
    context = _context_tokens(config)
    chunks = chunks_of(config)
    for layer, kind in enumerate(kinds[: config.num_hidden_layers]):
        shown = recorded.shown[layer]
        if chunks[layer]:
            if shown != -min(chunks[layer], context):
                raise ModelUnsupported(f"the mask of its layer {layer} has no chunks of {chunks[layer]} tokens")
            continue
        for source, window in (
            ("attention is given", recorded.windows[layer]),
            ("cache has", declared if kind == "sliding_attention" else None),
        ):
            if shown != min(window or context, context):
                window_text = "no window" if window is None else f"a window of {window}"
                raise ModelUnsupported(
                    f"the mask of its layer {layer} shows {shown} tokens, but its {source} {window_text}"
                )


def _check_equal(expected: _Probe, found: _Probe, order: torch.Tensor, fault: str) -> None:
    """Compare what was computed for each token; `order` has the token at each place of `found`.

    Raises ModelUnsupported with `fault` if they differ.
    """
    tolerance = 1e-3 if expected.computed[0].dtype == torch.float32 else 5e-2
    for one, other in zip(expected.computed, found.computed, strict=True):
        # The median, because a router near a tie may send a token to another expert.
        if _differences(one[order.to(one.device)], other).nanmedian() > tolerance:
            raise ModelUnsupported(fault)


def _differences(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the relative distance of each token's numbers."""
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
    """Return a mask whose elements are the number of visible tokens, of chunks less than 0; 0 if they are neither."""
    text = config.get_text_config()
    context = _context_tokens(text)
    shown = _shown(mask_function, context - 1)
    tried = (0, context // 2, context - 2)
    # With a rule that varies by position, other tokens see another number.
    if all(_shown(mask_function, token) == min(shown, token + 1) for token in tried):
        return torch.full((1, 1, q_length, kv_length), shown)
    chunk = min(getattr(text, "attention_chunk_size", None) or context, context)
    chunked = all(_shown(mask_function, token) == token % chunk + 1 for token in (*tried, chunk - 1, context - 1))
    return torch.full((1, 1, q_length, kv_length), -chunk if chunked else 0)


def _shown(mask_function: Callable[..., torch.Tensor], token: int) -> int:
    """Count the tokens visible to a token; 0 if they are not the last ones up to itself."""
    nothing = torch.tensor(0)
    keys = torch.arange(token + 2)
    visible = torch.as_tensor(mask_function(nothing, nothing, torch.tensor(token), keys)).expand(len(keys))
    count = int(visible.sum())
    return 0 if visible[-1] or not visible[token + 1 - count : -1].all() else count


def _context_tokens(config: Any) -> int:
    try:
        return context_tokens(config)
    except ModelUnsupported:  # raised again later, where it is the only reason
        return _TOKENS
