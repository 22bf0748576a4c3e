"""Replaces the attention of transformers models by paged attention.

transformers calls the function registered under the name that the model was loaded with, and passes the keyword
arguments of the model's forward call to it. So the batch is an argument, and only the registration is global.
"""

from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface

from engine.attention.backend import Scoring
from engine.attention.paged_context import PagedContext
from engine.errors import ModelUnsupported

ATTENTION_NAME = "quire_paged"
CUSTOM_MASK = "its attention uses a custom mask, which paged attention does not support"
# Tensors that models pass to their attention without effect. Any other tensor would change the result.
_UNUSED_TENSORS = frozenset({"position_ids", "cache_position"})


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
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Write K and V to their slots, then attend to the blocks.

    `query` is `[1, heads, tokens, key_size]`, `key` `[1, kv_heads, tokens, key_size]`, `value` `[1, kv_heads, tokens,
    value_size]`; returns `[1, tokens, heads, value_size]`. `s_aux` is transformers' name of sinks. Raises
    ModelUnsupported if the model's attention does anything else.
    """
    if paged is None:
        raise ModelUnsupported("its layers do not pass the arguments of the forward call to their attention")
    if attention_mask is not None:
        raise ModelUnsupported(CUSTOM_MASK)
    for name, other in others.items():
        if isinstance(other, torch.Tensor) and name not in _UNUSED_TENSORS:
            raise ModelUnsupported(f"its attention takes a tensor {name!r}, which paged attention does not support")
    layer = module.layer_idx
    assert isinstance(layer, int), "transformers numbers its attention layers"
    scoring = Scoring(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    if (tuning := getattr(module, "query_tuning", None)) is not None:
        query = tuning.applied(query, paged.positions)
    query, key, value = (one[0].transpose(0, 1) for one in (query, key, value))
    if paged.padding:
        query, key, value = (one[: -paged.padding] for one in (query, key, value))
    paged.backend.write(layer, key, value, paged.batch)
    output = paged.backend.attend(layer, query, paged.batch, scoring)
    if paged.padding:
        output = torch.cat([output, output.new_zeros(paged.padding, *output.shape[1:])])
    return output.unsqueeze(0), None


class QueryTuning(NamedTuple):
    """Llama-4's scale of queries in layers without rotations, by position (Nakanishi 2025, arXiv 2501.19399).

    Its modules compute it from the number of cached tokens, which is no position where sequences share a step.
    """

    floor: float
    scale: float

    def applied(self, query: torch.Tensor, positions: torch.Tensor | None) -> torch.Tensor:
        """Return `[1, heads, tokens, size]` queries times the scale of each token's position."""
        assert positions is not None, "every forward call has them"
        scales = torch.log1p(torch.floor((positions.float() + 1.0) / self.floor)) * self.scale + 1.0
        return (query * scales[:, None]).to(query.dtype)


def tune_by_positions(model: torch.nn.Module) -> None:
    """Let paged attention scale the queries of modules that would do so by the number of cached tokens."""
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            tuning = QueryTuning(float(module.floor_scale), float(module.attn_scale))  # type: ignore[arg-type]
            module.query_tuning = tuning  # type: ignore[assignment]
            module.attn_temperature_tuning = False  # type: ignore[assignment]


def register() -> None:
    """Register paged attention with transformers. Idempotent.

    No function for its masks is registered, because positions and block tables define which tokens are visible. With
    one, transformers would compare the position ids in each step, which waits for a GPU.
    """
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
