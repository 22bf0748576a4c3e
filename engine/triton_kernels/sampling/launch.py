"""Chooses one token for each row of logits."""

from typing import NamedTuple

import torch

ROW_WORDS = 14  # int32 words of one row's parameters


class Batch(NamedTuple):
    """Rows to sample.

    `logits`: `[rows, vocabulary]`, of any float type. `rows`: `[rows, ROW_WORDS]` int32, the parameters that
    engine.run.device_sampler packs. `changed`: `[changed rows, vocabulary]` float32, read instead of the logits by rows
    with a source. `counts`: `[slots, vocabulary]` int16, see engine.run.token_counts. `filtered`: number of rows with
    filters.
    """

    logits: torch.Tensor
    rows: torch.Tensor
    changed: torch.Tensor | None
    counts: torch.Tensor
    filtered: int


def choose_tokens(batch: Batch) -> torch.Tensor:
    """Return `[rows]` int64 token ids, and add each to the counts of its slot, where the row says so."""
    raise NotImplementedError
