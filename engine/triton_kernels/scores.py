"""The factors of a layer's scores, in base 2."""

import math
from typing import NamedTuple

import torch

from engine.attention.backend import Scoring
from engine.triton_kernels.paged_layer import PagedLayer


class ScoreFactors(NamedTuple):
    """A score is `q.k * scale`, or `tanh(q.k * scale) * cap` if capped; the weight is 2 to its power.

    `window`: number of visible tokens, 0 for all. `sinks`: `[heads]`, not yet in base 2, contiguous on the device.
    """

    scale: float
    cap: float
    capped: bool
    window: int
    sinks: torch.Tensor | None

    @classmethod
    def of(cls, scoring: Scoring) -> "ScoreFactors":
        """Convert a scoring to base 2, so that a weight takes one instruction."""
        window = scoring.window or 0
        sinks = None if scoring.sinks is None else scoring.sinks.detach().contiguous()
        if scoring.softcap is None:
            return cls(scoring.scaling * math.log2(math.e), 0.0, capped=False, window=window, sinks=sinks)
        cap = scoring.softcap * math.log2(math.e)
        return cls(scoring.scaling / scoring.softcap, cap, capped=True, window=window, sinks=sinks)


def attention_arguments(
    query: torch.Tensor, output: torch.Tensor, layer: PagedLayer, factors: ScoreFactors
) -> dict[str, torch.Tensor | int | None]:
    """Return the arguments in which the launches of one batch differ, in layers of the same shape and scoring."""
    return {"query": query, "output": output, "sinks": factors.sinks, "key_offset": layer.key_offset}
