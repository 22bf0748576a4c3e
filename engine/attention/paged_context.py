"""What a model's forward call passes to the attention of each layer."""

from typing import NamedTuple

import torch

from engine.attention.backend import AttentionBackend, PagedBatch


class PagedContext(NamedTuple):
    """The keyword argument `paged` of a forward call, which reaches every layer's attention.

    The last `padding` tokens of the forward call are not in the batch: they have no slots, and attend to nothing.
    `positions` are those of all tokens, `[tokens]`, for layers that scale their queries by them.
    """

    backend: AttentionBackend
    batch: PagedBatch
    padding: int = 0
    positions: torch.Tensor | None = None
