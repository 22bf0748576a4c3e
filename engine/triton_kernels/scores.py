"""The factors of a layer's scores, in base 2."""

import math
from typing import NamedTuple

from engine.attention.backend import Scoring


class ScoreFactors(NamedTuple):
    """A score is `q.k * scale`, or `tanh(q.k * scale) * cap` if capped; the weight is 2 to its power.

    `window`: number of visible tokens, 0 for all.
    """

    scale: float
    cap: float
    capped: bool
    window: int

    @classmethod
    def of(cls, scoring: Scoring) -> "ScoreFactors":
        """Convert a scoring to base 2, so that a weight takes one instruction."""
        window = scoring.window or 0
        if scoring.softcap is None:
            return cls(scoring.scaling * math.log2(math.e), 0.0, capped=False, window=window)
        return cls(scoring.scaling / scoring.softcap, scoring.softcap * math.log2(math.e), capped=True, window=window)
