"""The distribution of work over engines and time, from their counters."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Loads = NDArray[np.float64]


@dataclass
class LoadSamples:
    """Cumulative work of each engine at sampled times: uncached prompt tokens and generated tokens."""

    moments: list[float] = field(default_factory=list)
    done: list[tuple[float, ...]] = field(default_factory=list)

    def add(self, moment: float, done: Sequence[float]) -> None:
        """Record the cumulative work of all engines at a time later than the last."""
        self.moments.append(moment)
        self.done.append(tuple(done))

    def windows(self, width: float, end: float) -> Loads:
        """Return the work in each whole window until `end`, [windows, engines]; between samples it grows linearly."""
        edges = np.arange(int(end / width) + 1) * width
        done = np.array(self.done)
        until = np.stack([np.interp(edges, self.moments, done[:, engine]) for engine in range(done.shape[1])], axis=1)
        return np.diff(until, axis=0)


def most_over_mean(windows: Loads) -> float | None:
    """Return the largest load of an engine in a window over the engines' mean in it; None without any load."""
    means = windows.mean(axis=1)
    loaded = means > 0
    return float((windows.max(axis=1)[loaded] / means[loaded]).max()) if loaded.any() else None
