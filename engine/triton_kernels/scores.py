"""The factors of a layer's scores, to the base 2."""

import math
from typing import NamedTuple

from engine.attention.backend import Scoring


class ScoreFactors(NamedTuple):
    """A score is `q.k * scale`, or `tanh(q.k * scale) * cap` where it is capped; 2 to its power is the weight.

    `window`: how many tokens are looked at, 0 for all.
    """

    scale: float
    cap: float
    capped: bool
    window: int

    @classmethod
    def of(cls, scoring: Scoring) -> "ScoreFactors":
        """Bring a scoring to the base 2, so that weights take one instruction."""
        window = scoring.window or 0
        if scoring.softcap is None:
            return cls(scoring.scaling * math.log2(math.e), 0.0, capped=False, window=window)
        return cls(scoring.scaling / scoring.softcap, scoring.softcap * math.log2(math.e), capped=True, window=window)
