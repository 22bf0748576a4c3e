"""Histograms of requests by model and engine.

Names, labels and buckets are vLLM's, with the prefix `quire_`, and finer buckets for a single stream on a fast GPU.
"""

from dataclasses import dataclass
from enum import Enum

from prometheus_client import Counter

from services.runtime.metrics.histograms import Buckets

_FIRST_TOKEN_SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_INTER_TOKEN_SECONDS = (
    *(0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5),
    *(5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
# vLLM's buckets end at the model's context; a gateway may serve several models.
_TOKENS = (*(first * 10**power for power in range(6) for first in (1, 2, 5)), 1_000_000)
_SAMPLES = (1, 2, 5, 10, 20)

# Name, help text and buckets. Each request adds a value.
DISTRIBUTIONS: dict[str, tuple[str, str, tuple[float, ...]]] = {
    "first_token": (
        "quire_time_to_first_token_seconds",
        "Seconds from the arrival of a request to its first token.",
        _FIRST_TOKEN_SECONDS,
    ),
    "inter_token": (
        "quire_inter_token_latency_seconds",
        "Seconds between two tokens of a request; tokens of one delta share the time.",
        _INTER_TOKEN_SECONDS,
    ),
    "end_to_end": (
        "quire_e2e_request_latency_seconds",
        "Seconds from the arrival of a finished request to its end.",
        _REQUEST_SECONDS,
    ),
    "queued": (
        "quire_request_queue_time_seconds",
        "Seconds that a finished request was queued at its engine.",
        _REQUEST_SECONDS,
    ),
    "prefill": (
        "quire_request_prefill_time_seconds",
        "Seconds from a finished request's first step to its first token.",
        _REQUEST_SECONDS,
    ),
    "decode": (
        "quire_request_decode_time_seconds",
        "Seconds from a finished request's first token to its last.",
        _REQUEST_SECONDS,
    ),
    "inference": (
        "quire_request_inference_time_seconds",
        "Seconds from a finished request's first step to its last token.",
        _REQUEST_SECONDS,
    ),
    "per_token": (
        "quire_request_time_per_output_token_seconds",
        "Mean seconds between the tokens of finished requests with more than one token.",
        _INTER_TOKEN_SECONDS,
    ),
    "prompt_tokens": ("quire_request_prompt_tokens", "Prompt tokens of finished requests.", _TOKENS),
    "generated_tokens": (
        "quire_request_generation_tokens",
        "Generated tokens of finished requests, over all samples.",
        _TOKENS,
    ),
    "longest_sample": (
        "quire_request_max_num_generation_tokens",
        "Tokens of the longest sample of finished requests.",
        _TOKENS,
    ),
    "max_tokens": (
        "quire_request_params_max_tokens",
        "max_tokens of finished requests, given or default.",
        _TOKENS,
    ),
    "samples": ("quire_request_params_n", "Samples of finished requests.", _SAMPLES),
    "computed_tokens": (
        "quire_request_prefill_kv_computed_tokens",
        "Prompt tokens of finished requests that were not in the prefix cache.",
        _TOKENS,
    ),
}


class FinishedReason(Enum):
    """How a submitted request ended; the values of vLLM's label `finished_reason`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass
class EngineSeries:
    """The series of one model at one engine, and the number of requests that add to them."""

    distributions: dict[str, Buckets]
    ended: dict[FinishedReason, Counter]
    in_flight: int = 0
