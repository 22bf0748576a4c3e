"""The KV manager's Prometheus metrics: the blocks of every pool, and the time of block steps.

Metrics that vLLM has use its names and labels with the prefix `quire_`.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from blocks import KIND_0, CondemnReason, StepRefusal
from kvmanager import AppliedStep, Session, Slots, Tier
from services.kvmanager.block_lifetime_metrics import BlockLifetimeMetrics
from services.kvmanager.observer import POOL_LABELS, PoolObserver, pool_labels
from services.runtime.metrics.histograms import Histogram
from services.runtime.slices import run_in_slices

_STEP_SECONDS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0)

# Slices between two pauses take some 0.5 ms. A block step needs several turns of the event loop, for which a pause of a
# millisecond is enough.
_SLICES_TOGETHER = 8
_PAUSE_SECONDS = 0.001

_Values = dict[tuple[str, ...], float]

# Name, help text, labels besides model_name and engine, and a function from a session and its slots to the values by
# these labels.
_GAUGES: tuple[tuple[str, str, tuple[str, ...], Callable[[Session, Slots], _Values]], ...] = (
    (
        "quire_kv_blocks",
        "Blocks by kind and state: free, cached (no holder, but may be hit), held, withheld (faulty).",
        ("kind", "tier", "state"),
        lambda session, _: {
            (*of, state): number
            for of, blocks in _tiers(session).items()
            for state, number in blocks.counts._asdict().items()
        },
    ),
    (
        "quire_kv_pool_blocks",
        "Blocks of the pool in all states, by kind.",
        ("kind", "tier"),
        lambda session, _: {of: blocks.total for of, blocks in _tiers(session).items()},
    ),
    (
        "quire_kv_cache_usage_perc",
        "Share of the pool's blocks that are held, 0 to 1, in the kind that has the least room.",
        (),
        lambda session, _: {(): session.pool.usage},
    ),
    (
        "quire_kv_held_tokens",
        "Computed tokens in held blocks; tokens of shared blocks count once.",
        (),
        lambda _, slots: {(): slots.tokens},
    ),
    (
        "quire_kv_held_slots",
        "Slots in held blocks, one slot per token.",
        (),
        lambda session, _: {(): session.pool.device.counts.held * session.pool.spec.block_size},
    ),
    (
        "quire_kv_slots",
        "Slots in held blocks by use: computed tokens, reserved for the running prefill, lookahead, internal.",
        ("kind",),
        lambda _, slots: {(kind,): number for kind, number in slots._asdict().items()},
    ),
    (
        "quire_kv_shared_blocks",
        "Blocks with more than one holder.",
        (),
        lambda session, _: {(): session.pool.device.shared},
    ),
    (
        "quire_kv_saved_blocks",
        "Blocks saved by sharing: holders beyond the first, summed over blocks.",
        (),
        lambda session, _: {(): session.pool.device.saved},
    ),
    (
        "quire_kv_pinned_blocks",
        "Pinned blocks.",
        (),
        lambda session, _: {(): session.pool.pinned_blocks},
    ),
    (
        "quire_kv_pool_connected",
        "1 while the engine is connected, 0 while it is disconnected and its lease has not expired.",
        (),
        lambda session, _: {(): session.connected},
    ),
    (
        "quire_kv_sequences",
        "Sequences with a block table.",
        (),
        lambda session, _: {(): len(session.pool.sequences)},
    ),
)

# The same for values that only grow while a pool is attached.
_COUNTERS: tuple[tuple[str, str, tuple[str, ...], Callable[[Session, Slots], _Values]], ...] = (
    (
        "quire_prefix_cache_queries",
        "Prompt tokens of allocates, looked up in the prefix cache.",
        (),
        lambda session, _: {(): session.totals.prefix_query_tokens},
    ),
    (
        "quire_prefix_cache_hits",
        "Prompt tokens of allocates, found in the prefix cache.",
        (),
        lambda session, _: {(): session.totals.prefix_hit_tokens},
    ),
    (
        "quire_kv_granted_blocks",
        "Blocks granted.",
        (),
        lambda session, _: {(): session.totals.granted_blocks},
    ),
    (
        "quire_kv_evicted_blocks",
        "Cached blocks evicted by grants.",
        (),
        lambda session, _: {(): session.totals.evicted_blocks},
    ),
    (
        "quire_kv_copied_blocks",
        "Blocks copied on write, because they were shared or keyed.",
        (),
        lambda session, _: {(): session.totals.copied_blocks},
    ),
    (
        "quire_kv_moved_blocks",
        "Blocks copied between the tiers: to the host by swaps and evictions, to the device by swaps and hits.",
        ("to",),
        lambda session, _: {
            ("host",): session.totals.to_host_blocks,
            ("device",): session.totals.to_device_blocks,
        },
    ),
    (
        "quire_kv_refusals",
        "Refused items of block steps by reason.",
        ("reason",),
        lambda session, _: {(reason.name.lower(),): session.totals.refusals[reason] for reason in StepRefusal},
    ),
    (
        "quire_kv_audits",
        "Completed audits of the pool.",
        (),
        lambda session, _: {(): session.totals.audits},
    ),
    (
        "quire_kv_audit_violations",
        "Violations found by audits. The faulty blocks are withheld.",
        (),
        lambda session, _: {(): session.totals.audit_violations},
    ),
    (
        "quire_kv_condemned_blocks",
        "Blocks of all kinds that the engine condemned because their contents are wrong, by tier and reason.",
        ("tier", "reason"),
        lambda session, _: {
            (name, reason.name.lower()): session.totals.condemned_blocks[host, reason]
            for name, host in (("device", False), ("host", True))
            for reason in CondemnReason
        },
    ),
)


# Counters that outlive pools. They have no engine label, because its values would accumulate.
_LIFECYCLE_COUNTERS = (
    ("quire_kv_attaches", "Attaches of engines, first and repeated."),
    ("quire_kv_broken_streams", "Lost streams of engines; each begins a lease."),
    ("quire_kv_expired_leases", "Pools dropped because their engines did not attach again within the lease."),
)


class _PoolReading:
    """The values of one pool at one moment."""

    def __init__(self, session: Session, slots: Slots) -> None:
        self.session = session
        self.labels = pool_labels(session)
        self.values = {name: values(session, slots) for name, _, _, values in (*_GAUGES, *_COUNTERS)}


class KVManagerMetrics(PoolObserver, Collector):
    """Reads the attached pools at each scrape, and keeps a histogram of block step times.

    A pool's series exist as long as its session. The histogram starts again with each session, the counters with each
    incarnation of the engine.
    """

    def __init__(self, sample: float = 0.0) -> None:
        """`sample` is the share of block lifetimes that are sampled, 0 to 1."""
        self.registry = CollectorRegistry()
        self._sessions: dict[str, Session] = {}
        self._readings: list[_PoolReading] | None = None
        self._step_seconds = Histogram(
            self.registry,
            "quire_kv_step_seconds",
            "Seconds to read, apply and answer one Step.",
            POOL_LABELS,
            _STEP_SECONDS,
        )
        self._attaches, self._broken_streams, self._expired_leases = (
            Counter(name, meaning, POOL_LABELS[:1], registry=self.registry) for name, meaning in _LIFECYCLE_COUNTERS
        )
        self._block_lifetimes = BlockLifetimeMetrics(self.registry, sample)
        self.registry.register(self)

    def on_attach(self, session: Session) -> None:
        """Add the series of a pool, and remove the series of the engine's older pool."""
        for counter in (self._attaches, self._broken_streams, self._expired_leases):
            counter.labels(session.pool.spec.model)
        self._attaches.labels(session.pool.spec.model).inc()
        replaced = self._sessions.get(session.pool.spec.engine_id)
        if replaced:
            self._remove(replaced)
        self._sessions[session.pool.spec.engine_id] = session
        self._step_seconds.labels(*pool_labels(session))
        self._block_lifetimes.on_attach(session)

    def on_step(self, session: Session, applied: AppliedStep, seconds: float) -> None:
        """Count a block step."""
        self._step_seconds.labels(*pool_labels(session)).observe(seconds)
        self._block_lifetimes.on_step(session, applied)

    def on_disconnect(self, session: Session) -> None:
        """Count a lost stream."""
        self._broken_streams.labels(session.pool.spec.model).inc()

    def on_lease_expired(self, session: Session) -> None:
        """Count an expired lease."""
        self._expired_leases.labels(session.pool.spec.model).inc()

    def on_detach(self, session: Session) -> None:
        """Remove a pool's series, unless the session was replaced."""
        if self._sessions.get(session.pool.spec.engine_id) is session:
            self._remove(session)

    def _remove(self, session: Session) -> None:
        del self._sessions[session.pool.spec.engine_id]
        self._step_seconds.remove(*pool_labels(session))
        self._block_lifetimes.on_detach(session)

    async def prepare(self) -> None:
        """Read all pools for the next `collect`, in slices."""
        readings = []
        for session in list(self._sessions.values()):
            slots = await run_in_slices(session.pool.count_slots(), _SLICES_TOGETHER, _PAUSE_SECONDS)
            readings.append(_PoolReading(session, slots))
            await asyncio.sleep(0)
        self._readings = readings

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics as read by `prepare`, or as they are now if it was not called."""
        readings, self._readings = self._readings, None
        if readings is None:
            readings = [_PoolReading(session, session.pool.slots()) for session in self._sessions.values()]
        yield _cache_config(readings)
        for name, meaning, labels, _ in _GAUGES:
            yield _filled(GaugeMetricFamily(name, meaning, labels=(*POOL_LABELS, *labels)), name, readings)
        for name, meaning, labels, _ in _COUNTERS:
            yield _filled(CounterMetricFamily(name, meaning, labels=(*POOL_LABELS, *labels)), name, readings)

    def describe(self) -> Iterable[Metric]:
        """Yield the metrics of `collect`."""
        return self.collect()


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily, name: str, readings: Iterable[_PoolReading]
) -> GaugeMetricFamily | CounterMetricFamily:
    for reading in readings:
        for labels, value in reading.values[name].items():
            family.add_metric([*reading.labels, *labels], value)
    return family


def _cache_config(readings: Iterable[_PoolReading]) -> InfoMetricFamily:
    family = InfoMetricFamily("quire_cache_config", "Configuration of the pool.", labels=POOL_LABELS)
    for reading in readings:
        spec = reading.session.pool.spec
        family.add_metric(
            reading.labels,
            {
                "block_size": str(spec.block_size),
                "num_gpu_blocks": str(spec.device_blocks),
                "num_cpu_blocks": str(spec.host_blocks),
            },
        )
    return family


def _tiers(session: Session) -> dict[tuple[str, ...], Tier]:
    """Return the tiers that have blocks, by kind and tier; kind 0 is `all`."""
    tiers = {
        (kind.kind_name or KIND_0, name): tier
        for kind in session.pool.state.kinds
        for name, tier in (("device", kind.device), ("host", kind.host))
    }
    return {of: tier for of, tier in tiers.items() if tier.total}
