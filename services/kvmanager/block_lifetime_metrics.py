"""Histograms of block lifetimes and prefix cache hits, with vLLM's metric names and buckets."""

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
    """Samples the block lifetimes of every pool."""

    def __init__(self, registry: CollectorRegistry, share: float) -> None:
        """Sample the share `share` of all lifetimes, 0 to 1. The histograms have no series if it is 0."""
        self._share = share
        self._lifetimes: dict[Session, BlockLifetimes] = {}
        self._histograms = [  # in the order of LifetimeSamples
            Histogram(registry, name, meaning, POOL_LABELS, _SECONDS)
            for name, meaning in (
                (
                    "quire_kv_block_lifetime_seconds",
                    "Seconds between two grants of a block; sampled.",
                ),
                (
                    "quire_kv_block_idle_before_evict_seconds",
                    "Seconds between the last grant or prefix cache hit of a block and its next grant; sampled.",
                ),
                (
                    "quire_kv_block_reuse_gap_seconds",
                    "Seconds between two prefix cache hits of a block; sampled.",
                ),
            )
        ]

    def on_attach(self, session: Session) -> None:
        """Follow a new session's pool. The lifetimes of blocks in use are not sampled."""
        if self._share:
            self._lifetimes[session] = BlockLifetimes(self._share, random.random)
            for histogram in self._histograms:
                histogram.labels(*pool_labels(session))

    def on_step(self, session: Session, applied: AppliedStep) -> None:
        """Observe the lifetimes that a block step ended."""
        samples = self._lifetimes[session].on_step(applied, time.monotonic()) if session in self._lifetimes else None
        if samples is None:
            return
        for histogram, values in zip(self._histograms, samples, strict=True):
            if values:
                series = histogram.labels(*pool_labels(session))
                for value in values:
                    series.observe(value)

    def on_detach(self, session: Session) -> None:
        """Remove a session and its series."""
        self._lifetimes.pop(session, None)
        for histogram in self._histograms:
            histogram.remove(*pool_labels(session))
