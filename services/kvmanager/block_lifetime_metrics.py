"""How long blocks live and how often they are found again, as histograms: under vLLM's names, with vLLM's buckets."""

import random
import time

from prometheus_client import CollectorRegistry

from kvmanager import AppliedStep, BlockLifetimes, Session
from services.kvmanager.observer import POOL_LABELS, pool_labels
from services.runtime.metrics.histograms import Histogram

_SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0),
    *(600.0, 1200.0, 1800.0),
)


class BlockLifetimeMetrics:
    """Follows a sample of every pool's lives."""

    def __init__(self, registry: CollectorRegistry, share: float) -> None:
        """`share` of all lives is followed, 0 to 1; the histograms have no series while it is 0."""
        self._share = share
        self._lives: dict[Session, BlockLifetimes] = {}
        self._histograms = [  # in the order of what is observed
            Histogram(registry, name, meaning, POOL_LABELS, _SECONDS)
            for name, meaning in (
                (
                    "quire_kv_block_lifetime_seconds",
                    "Seconds from when a block was handed out until it was handed out again; of a sample.",
                ),
                (
                    "quire_kv_block_idle_before_evict_seconds",
                    "Seconds of that after the block was last handed out or found in the prefix cache; of a sample.",
                ),
                (
                    "quire_kv_block_reuse_gap_seconds",
                    "Seconds between two times that a block was found in the prefix cache; of a sample.",
                ),
            )
        ]

    def attached(self, session: Session) -> None:
        """Follow a new session's pool; the lives of what it holds already are unknown."""
        if self._share:
            self._lives[session] = BlockLifetimes(self._share, random.random)
            for histogram in self._histograms:
                histogram.labels(*pool_labels(session))

    def stepped(self, session: Session, applied: AppliedStep) -> None:
        """Take in what a Step has just done."""
        observed = self._lives[session].on_step(applied, time.monotonic()) if session in self._lives else None
        if observed is None:
            return
        for histogram, values in zip(self._histograms, observed, strict=True):
            if values:
                series = histogram.labels(*pool_labels(session))
                for value in values:
                    series.observe(value)

    def detached(self, session: Session) -> None:
        """Forget a session that is shown no longer, and its series."""
        self._lives.pop(session, None)
        for histogram in self._histograms:
            histogram.remove(*pool_labels(session))
