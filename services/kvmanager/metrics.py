"""What the KV manager shows to Prometheus: the blocks of every pool, and how long Steps take.

The names and labels are vLLM's, under the prefix `quire_`, where vLLM has the metric.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from blocks import StepRefusal
from kvmanager import AppliedStep, Session, Slots, Tier
from services.kvmanager.block_lifetime_metrics import BlockLifetimeMetrics
from services.kvmanager.observer import POOL_LABELS, PoolObserver, pool_labels
from services.kvmanager.slices import run_in_slices
from services.runtime.metrics.histograms import Histogram

_STEP_SECONDS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1.0)

# Slices of counting slots between two pauses take some 0.5 ms. A Step goes through the event loop several times, and
# comes through a pause of a millisecond.
_SLICES_AT_ONCE = 8
_POLITE_SECONDS = 0.001

_Values = dict[tuple[str, ...], float]

# Name, meaning, labels beside model_name and engine, and the values by those labels: of a session, and of what its
# slots are good for.
_GAUGES: tuple[tuple[str, str, tuple[str, ...], Callable[[Session, Slots], _Values]], ...] = (
    (
        "quire_kv_blocks",
        "Blocks by state: free, cached (nobody holds it, but it can be hit), held, withheld by the audit.",
        ("tier", "state"),
        lambda session, _: {
            (tier, state): number
            for tier, blocks in _tiers(session).items()
            for state, number in blocks.counts._asdict().items()
        },
    ),
    (
        "quire_kv_pool_blocks",
        "Blocks of the pool, in whatever state.",
        ("tier",),
        lambda session, _: {(tier,): blocks.total for tier, blocks in _tiers(session).items()},
    ),
    (
        "quire_kv_cache_usage_perc",
        "Share of the pool's blocks that are held, 0 to 1.",
        (),
        lambda session, _: {(): session.pool.device.counts.held / session.pool.spec.device_blocks},
    ),
    (
        "quire_kv_held_tokens",
        "Tokens computed in held blocks, those of shared blocks counted once.",
        (),
        lambda _, slots: {(): slots.tokens},
    ),
    (
        "quire_kv_held_slots",
        "Tokens that held blocks could take.",
        (),
        lambda session, _: {(): session.pool.device.counts.held * session.pool.spec.block_size},
    ),
    (
        "quire_kv_slots",
        "The same slots by kind: tokens computed, reserved for the running prefill, lookahead, internal.",
        ("kind",),
        lambda _, slots: {(kind,): number for kind, number in slots._asdict().items()},
    ),
    (
        "quire_kv_shared_blocks",
        "Blocks held more than once.",
        (),
        lambda session, _: {(): session.pool.device.shared},
    ),
    (
        "quire_kv_saved_blocks",
        "Blocks that sharing saves: holders beyond the first, summed over blocks.",
        (),
        lambda session, _: {(): session.pool.device.saved},
    ),
    (
        "quire_kv_pinned_blocks",
        "Blocks that pins hold, whoever else holds them.",
        (),
        lambda session, _: {(): session.pool.pinned_blocks},
    ),
    (
        "quire_kv_pool_connected",
        "1 while the engine's stream is there, 0 while its broken stream's lease runs.",
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

# The same for what only grows while a pool is attached.
_COUNTERS: tuple[tuple[str, str, tuple[str, ...], Callable[[Session, Slots], _Values]], ...] = (
    (
        "quire_prefix_cache_queries",
        "Tokens of allocated prompts that were looked for in the prefix cache.",
        (),
        lambda session, _: {(): session.totals.prefix_query_tokens},
    ),
    (
        "quire_prefix_cache_hits",
        "Tokens of allocated prompts that were found in the prefix cache.",
        (),
        lambda session, _: {(): session.totals.prefix_hit_tokens},
    ),
    (
        "quire_kv_granted_blocks",
        "Blocks handed out.",
        (),
        lambda session, _: {(): session.totals.granted_blocks},
    ),
    (
        "quire_kv_evicted_blocks",
        "Cached blocks that lost their contents because their space was needed.",
        (),
        lambda session, _: {(): session.totals.evicted_blocks},
    ),
    (
        "quire_kv_copied_blocks",
        "Blocks copied before they were written to, because they were shared or keyed.",
        (),
        lambda session, _: {(): session.totals.copied_blocks},
    ),
    (
        "quire_kv_moved_blocks",
        "Blocks copied between the tiers: to the host by swaps and instead of being forgotten, and back.",
        ("to",),
        lambda session, _: {
            ("host",): session.totals.to_host_blocks,
            ("device",): session.totals.to_device_blocks,
        },
    ),
    (
        "quire_kv_refusals",
        "Items of Steps that were refused, by reason.",
        ("reason",),
        lambda session, _: {(reason.name.lower(),): session.totals.refusals[reason] for reason in StepRefusal},
    ),
    (
        "quire_kv_audits",
        "Audits of the pool's books that came to their end.",
        (),
        lambda session, _: {(): session.totals.audits},
    ),
    (
        "quire_kv_audit_violations",
        "Faults of the pool's books that audits found. The blocks to blame are withheld.",
        (),
        lambda session, _: {(): session.totals.audit_violations},
    ),
)


# What outlives pools, so it has no label for the engine: engines come and go.
_LIFE_COUNTERS = (
    ("quire_kv_attaches", "Times that an engine attached its pool, for the first time or again."),
    ("quire_kv_broken_streams", "Streams of engines that broke, so that their leases began."),
    ("quire_kv_expired_leases", "Pools that were dropped because no engine came back within the lease."),
)


class _Reading:
    """All figures of one pool at one moment."""

    def __init__(self, session: Session, slots: Slots) -> None:
        self.session = session
        self.labels = pool_labels(session)
        self.values = {name: values(session, slots) for name, _, _, values in (*_GAUGES, *_COUNTERS)}


class KVManagerMetrics(PoolObserver, Collector):
    """Looks at the attached pools whenever it is scraped, and keeps a histogram of their Steps.

    A pool's series begin with its session and end with it: what only grows starts anew when an engine attaches again.
    """

    def __init__(self, sample: float = 0.0) -> None:
        """`sample` is the share of blocks whose lives are followed, 0 to 1."""
        self.registry = CollectorRegistry()
        self._sessions: dict[str, Session] = {}
        self._readings: list[_Reading] | None = None
        self._step_seconds = Histogram(
            self.registry,
            "quire_kv_step_seconds",
            "Seconds to read, apply and answer one Step.",
            POOL_LABELS,
            _STEP_SECONDS,
        )
        self._sessions_begun, self._broken_streams, self._expired_leases = (
            Counter(name, meaning, POOL_LABELS[:1], registry=self.registry) for name, meaning in _LIFE_COUNTERS
        )
        self._block_lifetimes = BlockLifetimeMetrics(self.registry, sample)
        self.registry.register(self)

    def attached(self, session: Session) -> None:
        """Show a pool, in the place of an older one of the engine."""
        for counter in (self._sessions_begun, self._broken_streams, self._expired_leases):
            counter.labels(session.pool.spec.model)
        self._sessions_begun.labels(session.pool.spec.model).inc()
        replaced = self._sessions.get(session.pool.spec.engine_id)
        if replaced:
            self._forget(replaced)
        self._sessions[session.pool.spec.engine_id] = session
        self._step_seconds.labels(*pool_labels(session))
        self._block_lifetimes.attached(session)

    def stepped(self, session: Session, applied: AppliedStep, seconds: float) -> None:
        """Count a Step."""
        self._step_seconds.labels(*pool_labels(session)).observe(seconds)
        self._block_lifetimes.stepped(session, applied)

    def lost(self, session: Session) -> None:
        """Count a broken stream."""
        self._broken_streams.labels(session.pool.spec.model).inc()

    def expired(self, session: Session) -> None:
        """Count a lease that nobody came back within."""
        self._expired_leases.labels(session.pool.spec.model).inc()

    def detached(self, session: Session) -> None:
        """Show a pool no longer; one that was replaced is not shown any more already."""
        if self._sessions.get(session.pool.spec.engine_id) is session:
            self._forget(session)

    def _forget(self, session: Session) -> None:
        del self._sessions[session.pool.spec.engine_id]
        self._step_seconds.remove(*pool_labels(session))
        self._block_lifetimes.detached(session)

    async def prepare(self) -> None:
        """Read all pools for the next `collect`, a slice at a time: Steps are answered in between."""
        readings = []
        for session in list(self._sessions.values()):
            slots = await run_in_slices(session.pool.count_slots(), _SLICES_AT_ONCE, _POLITE_SECONDS)
            readings.append(_Reading(session, slots))
            await asyncio.sleep(0)
        self._readings = readings

    def collect(self) -> Iterator[Metric]:
        """Show the pools as they were read, or as they are now where nobody prepared for it."""
        readings, self._readings = self._readings, None
        if readings is None:
            readings = [_Reading(session, session.pool.slots()) for session in self._sessions.values()]
        yield _cache_config(readings)
        for name, meaning, labels, _ in _GAUGES:
            yield _filled(GaugeMetricFamily(name, meaning, labels=(*POOL_LABELS, *labels)), name, readings)
        for name, meaning, labels, _ in _COUNTERS:
            yield _filled(CounterMetricFamily(name, meaning, labels=(*POOL_LABELS, *labels)), name, readings)

    def describe(self) -> Iterable[Metric]:
        """Name what `collect` gives, without looking at any pool."""
        return self.collect()


def _filled(
    family: GaugeMetricFamily | CounterMetricFamily, name: str, readings: Iterable[_Reading]
) -> GaugeMetricFamily | CounterMetricFamily:
    for reading in readings:
        for labels, value in reading.values[name].items():
            family.add_metric([*reading.labels, *labels], value)
    return family


def _cache_config(readings: Iterable[_Reading]) -> InfoMetricFamily:
    family = InfoMetricFamily("quire_cache_config", "How the pool is made.", labels=POOL_LABELS)
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


def _tiers(session: Session) -> dict[str, Tier]:
    tiers = {"device": session.pool.device, "host": session.pool.host}
    return {name: tier for name, tier in tiers.items() if tier.total}
