"""The table of Quire's metrics and their counterparts in vLLM, for dashboards and autoscalers built for vLLM.

`--metrics-compat vllm` exports the metrics under both names. deploy/prometheus/vllm-rules.yml is generated from the
table, as an alternative to that setting.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

VLLM = "vllm"
COMPAT = ("none", VLLM)
METRICS_COMPAT = "Additional names of metrics: vllm, or none."


@dataclass(frozen=True)
class Counterpart:
    """A metric of Quire, and its current and former names in vLLM, without the prefixes `quire_` and `vllm:`.

    `kind` is gauge, counter, histogram or info. Counters are named without `_total`, infos without `_info`. `words`
    maps label values to vLLM's, for labels where they differ; values without counterpart are not exported. With
    `shown_by_engine` vLLM's names are on the engine's page, whichever service has Quire's: routers choose between
    engines by one page of each.
    """

    kind: str
    name: str
    older: tuple[str, ...] = ()
    words: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    shown_by_engine: bool = False

    @property
    def ours(self) -> str:
        """Quire's name."""
        return f"quire_{self.name}"

    @property
    def theirs(self) -> tuple[str, ...]:
        """VLLM's names, the current one first."""
        return tuple(f"vllm:{name}" for name in (self.name, *self.older))

    @property
    def suffixes(self) -> tuple[str, ...]:
        """Suffixes of the samples' names."""
        return _SUFFIXES[self.kind]

    def translated(self, labels: Mapping[str, str]) -> dict[str, str] | None:
        """Return the labels with vLLM's values, None if it has no counterpart."""
        changed = {label: words.get(labels[label]) for label, words in self.words.items()}
        known = {label: word for label, word in changed.items() if word is not None}
        return {**labels, **known} if len(known) == len(changed) else None


_SUFFIXES = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "info": ("_info",)}
_REJECTIONS = {"max_requests": "max_num_queued_reqs", "max_queued_tokens": "max_num_queued_tokens"}

COUNTERPARTS = (
    Counterpart("gauge", "num_requests_running"),
    Counterpart("gauge", "num_requests_waiting"),
    Counterpart("gauge", "num_requests_waiting_by_reason"),
    Counterpart("gauge", "kv_cache_usage_perc", ("gpu_cache_usage_perc",), shown_by_engine=True),
    Counterpart("info", "cache_config", shown_by_engine=True),
    Counterpart("histogram", "kv_block_lifetime_seconds"),
    Counterpart("histogram", "kv_block_idle_before_evict_seconds"),
    Counterpart("histogram", "kv_block_reuse_gap_seconds"),
    Counterpart("counter", "prompt_tokens"),
    Counterpart("counter", "prompt_tokens_by_source"),
    Counterpart("counter", "prompt_tokens_cached"),
    Counterpart("counter", "generation_tokens"),
    Counterpart("counter", "prefix_cache_queries", ("gpu_prefix_cache_queries",)),
    Counterpart("counter", "prefix_cache_hits", ("gpu_prefix_cache_hits",)),
    Counterpart("counter", "num_preemptions"),
    Counterpart("counter", "spec_decode_num_drafts"),
    Counterpart("counter", "spec_decode_num_draft_tokens"),
    Counterpart("counter", "spec_decode_num_accepted_tokens"),
    Counterpart("counter", "request_success"),
    Counterpart("counter", "admission_rejections", words={"reason": _REJECTIONS}),
    Counterpart("histogram", "iteration_tokens_total"),
    Counterpart("histogram", "time_to_first_token_seconds"),
    Counterpart("histogram", "inter_token_latency_seconds", ("time_per_output_token_seconds",)),
    Counterpart("histogram", "request_time_per_output_token_seconds"),
    Counterpart("histogram", "e2e_request_latency_seconds"),
    Counterpart("histogram", "request_queue_time_seconds"),
    Counterpart("histogram", "request_inference_time_seconds"),
    Counterpart("histogram", "request_prefill_time_seconds"),
    Counterpart("histogram", "request_decode_time_seconds"),
    Counterpart("histogram", "request_prompt_tokens"),
    Counterpart("histogram", "request_generation_tokens"),
    Counterpart("histogram", "request_max_num_generation_tokens"),
    Counterpart("histogram", "request_params_max_tokens"),
    Counterpart("histogram", "request_params_n"),
    Counterpart("histogram", "request_prefill_kv_computed_tokens"),
)


def shown_by_engine(name: str) -> tuple[str, ...]:
    """Return vLLM's names of a metric that only the engine shows under them, given without prefix."""
    (found,) = (one.theirs for one in COUNTERPARTS if one.shown_by_engine and one.name == name)
    return found
