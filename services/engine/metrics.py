"""Prometheus metrics of an engine: queue, tokens, preemptions, and the time of each phase of a step.

Names and labels are vLLM's, with the prefix `quire_`, where vLLM has the metric.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from blocks import CondemnReason
from engine.schedule.speculation.speculator import EXCLUSIONS
from services.engine.events.metrics import EVENT_COUNTERS, EVENT_GAUGES
from services.engine.observer import CacheStats, EngineObserver, EngineStats, StepStats
from services.runtime.metrics.histograms import Buckets, Histogram
from services.runtime.metrics.vllm_names import VLLM, shown_by_engine

_LABELS = ("model_name", "engine")
_STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
# All phases except the forward pass take microseconds.
_PHASE_SECONDS = (0.00001, 0.00002, 0.00005, 0.0001, 0.0002, 0.0005, *_STEP_SECONDS)
_ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
REASONS = {reason.name.lower(): reason for reason in CondemnReason}
PHASES = ("plan", "wait", "forward", "sample", "publish")

# A copy that fails leaves nothing to compare.
_UNCOMPARED = "copy"

_Values = dict[tuple[str, ...], float]


def _by_tier(blocks: Mapping[str, int]) -> _Values:
    return {(tier,): count for tier, count in blocks.items()}


def _by_reason(blocks: Mapping[CondemnReason, int], without: str = "") -> _Values:
    """Return a value for each reason, because `increase` misses the first value of a series."""
    return {(name,): blocks.get(reason, 0) for name, reason in REASONS.items() if name != without}


# Name, help text, labels other than model_name and engine, and the values by those labels.
_GAUGES: tuple[tuple[str, str, tuple[str, ...], Callable[[EngineStats], _Values]], ...] = (
    (
        "quire_model_formats_info",
        "1; the types of the model's numbers are labels: of computation, weights and KV cache.",
        ("dtype", "weights", "kv_dtype"),
        lambda stats: {stats.formats: 1} if stats.formats else {},
    ),
    (
        "quire_recording_failed",
        "1 if steps of this kind, decoding or prompts, could not be recorded on the GPU, so that each is launched anew;"
        " 0 if they are recorded.",
        ("steps",),
        lambda stats: {(kind,): bool(reason) for kind, reason in stats.recording_faults.items()},
    ),
    (
        "quire_kept_blocks",
        "Blocks in kept memory that would outlive the engine's process now, by tier.",
        ("tier",),
        lambda stats: _by_tier(stats.kept.sealed) if stats.kept else {},
    ),
    (
        "quire_kept_blocks_adopted",
        "Blocks that outlived the engine's earlier process, found at its last start, by tier.",
        ("tier",),
        lambda stats: _by_tier(stats.kept.adopted) if stats.kept else {},
    ),
    (
        "quire_kept_blocks_lost",
        "Blocks that requests held at the end of the earlier process and had not filled, by tier.",
        ("tier",),
        lambda stats: _by_tier(stats.kept.lost) if stats.kept else {},
    ),
    (
        "quire_kept_memory_refused",
        "1 if the engine erased the memory of an earlier process at its start, because of this difference.",
        ("difference",),
        lambda stats: {(stats.kept.refused,): 1} if stats.kept and stats.kept.refused else {},
    ),
    (
        "quire_kept_seals_broken",
        "Seals that differed from their own checksums at the engine's last start, whose blocks are lost.",
        (),
        lambda stats: {(): stats.kept.broken} if stats.kept else {},
    ),
    (
        "quire_kept_blocks_unannounced",
        "Blocks found at the engine's last start of which KV events do not tell, because their tokens are unknown.",
        (),
        lambda stats: {(): stats.kept.unknown} if stats.kept and stats.kept.unknown is not None else {},
    ),
    ("quire_num_requests_running", "Requests that hold blocks.", (), lambda stats: {(): stats.running}),
    ("quire_num_requests_waiting", "Requests that wait for blocks.", (), lambda stats: {(): stats.waiting}),
    (
        "quire_num_requests_waiting_by_reason",
        "Requests that wait for blocks, by reason: capacity; or deferred, because another request computes their prefix"
        " or the KV manager is disconnected.",
        ("reason",),
        lambda stats: {("capacity",): stats.waiting - stats.deferred, ("deferred",): stats.deferred},
    ),
    (
        "quire_seconds_without_step",
        "Seconds since the last step while requests are live; 0 without requests.",
        (),
        lambda stats: {(): stats.seconds_without_step},
    ),
    (
        "quire_smg_calls",
        "Calls of smg that generate.",
        (),
        lambda stats: {(): stats.smg.calls} if stats.smg else {},
    ),
    (
        "quire_smg_subscribers",
        "Streams of KV events to smg.",
        (),
        lambda stats: {(): stats.smg.subscribers} if stats.smg else {},
    ),
    (
        "quire_rank_seconds_behind",
        "Seconds from sending the latest plan to a rank until the rank has launched it.",
        ("rank",),
        lambda stats: (
            {(str(rank),): behind for rank, behind in stats.ranks.seconds_behind.items()} if stats.ranks else {}
        ),
    ),
)
_COUNTERS: tuple[tuple[str, str, tuple[str, ...], Callable[[EngineStats], _Values]], ...] = (
    (
        "quire_prompt_tokens",
        "Prompt tokens of started requests.",
        (),
        lambda stats: {(): stats.totals.prompt_tokens},
    ),
    (
        "quire_prompt_tokens_cached",
        "Prompt tokens of started requests that were in the prefix cache.",
        (),
        lambda stats: {(): stats.totals.cached_tokens},
    ),
    (
        "quire_prompt_tokens_by_source",
        "Prompt tokens of started requests, by source: computed here or found in the prefix cache.",
        ("source",),
        lambda stats: {
            ("local_compute",): stats.totals.prompt_tokens - stats.totals.cached_tokens,
            ("local_cache_hit",): stats.totals.cached_tokens,
        },
    ),
    ("quire_generation_tokens", "Tokens generated.", (), lambda stats: {(): stats.totals.generated_tokens}),
    (
        "quire_num_preemptions",
        "Preemptions of running requests.",
        (),
        lambda stats: {(): stats.totals.preemptions},
    ),
    (
        "quire_num_requests_failed",
        "Accepted requests that failed, by reason: step, block_manager, deadline, deadline_queued, constraint, or"
        " request (an error of this request alone).",
        ("reason",),
        lambda stats: {(one.name.lower(),): count for one, count in stats.totals.failures.items()},
    ),
    (
        "quire_num_limited_prefill_steps",
        "Steps in which long prompts received a small part of the token budget, because short prompts were in prefill"
        " or about to be admitted.",
        (),
        lambda stats: {(): stats.totals.limited_steps},
    ),
    (
        "quire_num_sequences_planned",
        "Sequences in executed steps, summed over steps.",
        (),
        lambda stats: {(): stats.totals.planned},
    ),
    (
        "quire_num_sequences_left_out",
        "Running sequences that stalled for a step because the KV manager's answer was late, summed over steps.",
        (),
        lambda stats: {(): stats.totals.skipped},
    ),
    (
        "quire_num_sequences_ahead",
        "Sequences in steps that were planned before the step in flight ended, summed over steps.",
        (),
        lambda stats: {(): stats.totals.ahead},
    ),
    (
        "quire_num_sequences_sat_out",
        "Running sequences deferred by such a step because they need the results of the step in flight: guided ones,"
        " beams, and penalized ones unless the sampler counts their tokens on the device. Summed over steps.",
        (),
        lambda stats: {(): stats.totals.sat_out},
    ),
    (
        "quire_spec_decode_num_drafts",
        "Sequences that had draft tokens in a step, summed over steps.",
        (),
        lambda stats: {(): stats.totals.drafts},
    ),
    (
        "quire_spec_decode_num_draft_tokens",
        "Draft tokens that steps verified.",
        (),
        lambda stats: {(): stats.totals.draft_tokens},
    ),
    (
        "quire_spec_decode_num_accepted_tokens",
        "Draft tokens that were accepted.",
        (),
        lambda stats: {(): stats.totals.accepted_tokens},
    ),
    (
        "quire_spec_decode_num_declined_tokens",
        "Draft tokens found by n-grams but not computed, because by the measured steps they would not pay.",
        (),
        lambda stats: {(): stats.totals.declined_tokens},
    ),
    (
        "quire_spec_decode_num_requests_excluded",
        "Started requests that get no draft tokens, by reason: beam_search, penalties or guided.",
        ("reason",),
        lambda stats: {(reason,): stats.totals.unspeculated.get(reason, 0) for reason in EXCLUSIONS},
    ),
    (
        "quire_kv_sessions",
        "Times that the pool was attached to the KV manager: once at the start, and once after each disconnect.",
        (),
        lambda stats: {(): stats.sessions},
    ),
    (
        "quire_recomputed_tokens",
        "Tokens recomputed after preemptions.",
        (),
        lambda stats: {(): stats.totals.recomputed_tokens},
    ),
    (
        "quire_swapped_tokens",
        "Computed tokens that preemptions moved to host memory instead of recomputing them.",
        (),
        lambda stats: {(): stats.totals.swapped_tokens},
    ),
    (
        "quire_kv_compared_blocks",
        "Blocks compared with their checksums, or with recomputed ones, by reason: adoption, swap_in, host_hit, hit,"
        " recomputation.",
        ("reason",),
        lambda stats: _by_reason(stats.proof.compared, without=_UNCOMPARED) if stats.proof else {},
    ),
    (
        "quire_kv_wrong_blocks",
        "Blocks that differed, by the same reasons, and by copy those whose copy failed.",
        ("reason",),
        lambda stats: _by_reason(stats.proof.wrong) if stats.proof else {},
    ),
    (
        "quire_kv_checksum_seconds",
        "Seconds that the engine's thread spent on checksums of blocks, without those that copies compute.",
        (),
        lambda stats: {(): stats.proof.seconds} if stats.proof else {},
    ),
    (
        "quire_smg_event_batches",
        "Batches of KV events sent to smg.",
        (),
        lambda stats: {(): stats.smg.batches} if stats.smg else {},
    ),
    (
        "quire_smg_snapshots",
        "Snapshots of the cached blocks sent to smg: at the beginning of a stream, and where events are not kept.",
        (),
        lambda stats: {(): stats.smg.snapshots} if stats.smg else {},
    ),
    (
        "quire_smg_catch_ups",
        "Times that a stream to smg was more batches behind than wait for it.",
        (),
        lambda stats: {(): stats.smg.catch_ups} if stats.smg else {},
    ),
    (
        "quire_rank_wait_seconds",
        "Seconds that rank 0 spent in collectives with the other ranks; on a GPU only those of queueing them.",
        (),
        lambda stats: {(): stats.ranks.wait_seconds} if stats.ranks else {},
    ),
    (
        "quire_rank_plans",
        "Step plans sent to each of the other ranks.",
        (),
        lambda stats: {(): stats.ranks.plans} if stats.ranks else {},
    ),
    (
        "quire_rank_plan_bytes",
        "Bytes of the step plans sent to each of the other ranks.",
        (),
        lambda stats: {(): stats.ranks.plan_bytes} if stats.ranks else {},
    ),
)


class EngineMetrics(EngineObserver, Collector):
    """Reads the engine's figures at each scrape, and keeps histograms of its steps."""

    def __init__(self, compat: str = "none") -> None:
        """Export metrics of the pool under vLLM's names if `compat` is vllm; Quire's names are the KV manager's."""
        self.registry = CollectorRegistry()
        self._for_routers = compat == VLLM
        self._stats: Callable[[], EngineStats] | None = None
        self._labels = ("", "")
        self._step_seconds = self._histogram(
            "quire_step_seconds", "Seconds of one step in the model and in sampling.", (), _STEP_SECONDS
        )
        self._phase_seconds = self._histogram(
            "quire_step_phase_seconds",
            "Seconds of one step by phase: plan, wait (for the KV manager), forward, sample, publish.",
            ("phase",),
            _PHASE_SECONDS,
        )
        self._iteration_tokens = self._histogram(
            "quire_iteration_tokens_total", "Tokens computed in one step.", (), _ITERATION_TOKENS
        )
        self._step: Buckets | None = None
        self._tokens: Buckets | None = None
        self._phases: tuple[Buckets, ...] = ()
        self.registry.register(self)

    def on_start(self, model_name: str, engine_id: str, stats: Callable[[], EngineStats]) -> None:
        """Export the engine's stats from now on."""
        self._labels = labels = (model_name, engine_id)
        self._step, self._tokens = self._step_seconds.labels(*labels), self._iteration_tokens.labels(*labels)
        self._phases = tuple(self._phase_seconds.labels(*labels, phase) for phase in PHASES)
        self._stats = stats

    def on_step(self, step: StepStats) -> None:
        """Count a step."""
        assert self._step is not None, "the engine has started"
        assert self._tokens is not None, "the engine has started"
        self._step.observe(step.seconds)
        if step.tokens:
            self._tokens.observe(step.tokens)
        times = (step.plan, step.wait, step.forward, step.sample, step.publish)
        for phase, seconds in zip(self._phases, times, strict=True):
            phase.observe(seconds)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; before the model is loaded they have no series."""
        stats = self._stats() if self._stats else None
        for name, meaning, labels, values in (*_GAUGES, *EVENT_GAUGES):
            yield self._filled(GaugeMetricFamily(name, meaning, labels=(*_LABELS, *labels)), stats, values)
        for name, meaning, labels, values in (*_COUNTERS, *EVENT_COUNTERS):
            yield self._filled(CounterMetricFamily(name, meaning, labels=(*_LABELS, *labels)), stats, values)
        if self._for_routers:
            yield from _of_cache(self._labels, stats.cache if stats else None)

    def describe(self) -> Iterable[Metric]:
        """Yield the metrics that `collect` yields."""
        return self.collect()

    def _histogram(self, name: str, meaning: str, labels: tuple[str, ...], bounds: tuple[float, ...]) -> Histogram:
        return Histogram(self.registry, name, meaning, (*_LABELS, *labels), bounds)

    def _filled(
        self,
        family: GaugeMetricFamily | CounterMetricFamily,
        stats: EngineStats | None,
        values: Callable[[EngineStats], _Values],
    ) -> Metric:
        if stats is not None:
            for labels, value in values(stats).items():
                family.add_metric([*self._labels, *labels], value)
        return family


def _of_cache(labels: tuple[str, str], cache: CacheStats | None) -> Iterator[Metric]:
    """Yield the pool's metrics under vLLM's names, without series before there is a pool."""
    for name in shown_by_engine("kv_cache_usage_perc"):
        usage = GaugeMetricFamily(name, "Share of the pool's blocks that are held, 0 to 1.", labels=_LABELS)
        if cache:
            usage.add_metric(labels, cache.usage)
        yield usage
    for name in shown_by_engine("cache_config"):
        config = InfoMetricFamily(name, "Configuration of the pool.", labels=_LABELS)
        if cache:
            config.add_metric(labels, _configuration(cache))
        yield config


def _configuration(cache: CacheStats) -> dict[str, str]:
    return {
        "block_size": str(cache.block_size),
        "num_gpu_blocks": str(cache.device_blocks),
        "num_cpu_blocks": str(cache.host_blocks),
    }
