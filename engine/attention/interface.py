"""Puts paged attention in the place of a transformers model's own.

transformers calls whatever is registered under the name that the model was loaded with, and hands it the keyword
arguments of the model's forward call. So the batch travels as an argument, and nothing is global but the registration.
"""

from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from engine.attention.backend import AttentionBackend, PagedBatch, Scoring
from engine.errors import ModelUnsupported

ATTENTION_NAME = "quire_paged"
MASK_OF_ITS_OWN = "its attention has a mask of its own making, which paged attention does not know"
# Tensors that models hand on to their attention although it has no use for them. Any other would change the result.
_UNUSED_TENSORS = frozenset({"position_ids", "cache_position"})


class PagedContext(NamedTuple):
    """What a forward call passes to every layer's attention, as the keyword argument `paged`."""

    backend: AttentionBackend
    batch: PagedBatch


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: PagedContext | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Write K and V to their slots, then attend to the blocks.

    `query` is `[1, heads, tokens, head_size]`, `key` and `value` `[1, kv_heads, tokens, head_size]`; returns
    `[1, tokens, heads, head_size]`. Raises ModelUnsupported where the model's attention is more than that.
    """
    if paged is None:
        raise ModelUnsupported("its layers do not hand their attention what the forward call is given")
    if attention_mask is not None:
        raise ModelUnsupported(MASK_OF_ITS_OWN)
    for name, other in others.items():
        if isinstance(other, torch.Tensor) and name not in _UNUSED_TENSORS:
            raise ModelUnsupported(f"its attention takes a tensor {name!r}, which paged attention does not know")
    layer = module.layer_idx
    assert isinstance(layer, int), "transformers numbers its attention layers"
    scoring = Scoring(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap)
    paged.backend.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1), paged.batch)
    output = paged.backend.attend(layer, query[0].transpose(0, 1), paged.batch, scoring)
    return output.unsqueeze(0), None


def _no_mask(*_arguments: Any, **_options: Any) -> None:
    """Make no mask: positions and block tables say who sees whom."""


def register() -> None:
    """Make the name known to transformers. Doing it twice is doing it once."""
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
