import asyncio

import pytest

from quire.v1 import decoding_pb2, gateway_pb2
from services.gateway.access.callers import DEFAULT_ORIGIN
from services.gateway.observe.metrics import GatewayMetrics
from services.gateway.observe.observer import RequestInfo, RequestObserver, RequestProgress
from services.runtime.errors import (
    DeadlineExceeded,
    GenerationFailed,
    InvalidField,
    Overloaded,
    SlowClient,
    Unavailable,
)

ARRIVAL = 100.0


class Shown:
    """A gateway's metrics, and one submitted request."""

    def __init__(self) -> None:
        self.metrics = GatewayMetrics()
        self.request: RequestObserver = self.metrics.on_request(RequestInfo("r", "m", DEFAULT_ORIGIN, ARRIVAL))
        self.request.on_admitted("r")
        self.request.on_submitted(RequestProgress(7, engine_id="e"))

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, {"model_name": "m", "engine": "e", **labels})

    def distribution(self, name: str) -> tuple[float | None, float | None]:
        return self.value(f"{name}_count"), self.value(f"{name}_sum")

    def endings(self) -> dict[str, float]:
        counts = {one: self.value("quire_request_success_total", finished_reason=one) for one in ENDINGS}
        return {one: count for one, count in counts.items() if count}

    def open_streams(self) -> float | None:
        return self.metrics.registry.get_sample_value("quire_open_streams", {"model_name": "m", "protocol": "grpc"})


ENDINGS = ("stop", "length", "abort", "error")
FIRST, BETWEEN = "quire_time_to_first_token_seconds", "quire_inter_token_latency_seconds"


def finished(reason: decoding_pb2.FinishReason.ValueType) -> gateway_pb2.Finished:
    return gateway_pb2.Finished(samples=[gateway_pb2.SampleFinish(reason=reason)])


def test_latencies_of_tokens_and_the_end_are_observed() -> None:
    shown = Shown()
    shown.request.on_tokens(0, 1, ARRIVAL + 2)
    shown.request.on_tokens(0, 1, ARRIVAL + 3)
    assert shown.open_streams() == 1
    shown.request.on_ended(finished(decoding_pb2.FINISH_REASON_LENGTH), ARRIVAL + 4)
    assert shown.distribution(FIRST) == (1, 2.0)
    assert shown.distribution(BETWEEN) == (1, 1.0)
    assert shown.distribution("quire_e2e_request_latency_seconds") == (1, 4.0)
    assert shown.endings() == {"length": 1}
    assert shown.open_streams() == 0


def test_tokens_of_one_delta_share_the_time_and_text_alone_counts_as_none() -> None:
    shown = Shown()
    for now, count in enumerate((3, 0, 2), start=1):
        shown.request.on_tokens(0, count, ARRIVAL + now)
    assert shown.distribution(FIRST) == (1, 1.0)
    assert shown.distribution(BETWEEN) == (4, 2.0)
    shown.request.on_ended(finished(decoding_pb2.FINISH_REASON_STOP), ARRIVAL + 4)
    assert shown.distribution("quire_request_max_num_generation_tokens") == (1, 5)
    assert shown.endings() == {"stop": 1}


def test_sizes_and_times_of_a_finished_request_are_observed() -> None:
    end = finished(decoding_pb2.FINISH_REASON_LENGTH)
    end.samples.add(reason=decoding_pb2.FINISH_REASON_STOP)
    end.usage.CopyFrom(gateway_pb2.Usage(prompt_tokens=7, cached_tokens=4, generated_tokens=5))
    end.timing.queued.FromMilliseconds(250)
    end.timing.prefill.FromMilliseconds(500)
    end.timing.decode.FromMilliseconds(1500)
    shown = Shown()
    shown.request.on_started(gateway_pb2.Started(max_tokens=9))
    for sample, count in ((0, 2), (1, 1), (0, 2)):
        shown.request.on_tokens(sample, count, ARRIVAL)
    shown.request.on_ended(end, ARRIVAL + 3)
    expected = {
        "prompt_tokens": 7,
        "prefill_kv_computed_tokens": 3,
        "generation_tokens": 5,
        "max_num_generation_tokens": 4,
        "params_n": 2,
        "params_max_tokens": 9,
        "queue_time_seconds": 0.25,
        "prefill_time_seconds": 0.5,
        "decode_time_seconds": 1.5,
        "inference_time_seconds": 2.0,
        "time_per_output_token_seconds": 0.5,
    }
    assert {name: shown.distribution(f"quire_request_{name}") for name in expected} == {
        name: (1, value) for name, value in expected.items()
    }


@pytest.mark.parametrize(
    ("error", "endings"),
    [
        (DeadlineExceeded("late"), {"abort": 1}),
        (SlowClient("asleep"), {"abort": 1}),
        (Unavailable("gone"), {"error": 1}),
        (GenerationFailed("broken"), {"error": 1}),
        (GeneratorExit(), {"abort": 1}),
        (asyncio.CancelledError(), {"abort": 1}),
        (Overloaded("full"), {}),
    ],
)
def test_errors_have_a_finished_reason_and_rejections_none(error: BaseException, endings: dict[str, float]) -> None:
    shown = Shown()
    shown.request.on_tokens(0, 1, ARRIVAL + 1)
    shown.request.on_failed(error, ARRIVAL + 2)
    assert shown.endings() == endings
    assert shown.distribution("quire_e2e_request_latency_seconds") == (0, 0)
    assert shown.open_streams() == 0


def test_a_request_that_was_not_submitted_has_no_finished_reason() -> None:
    metrics = GatewayMetrics()
    request = metrics.on_request(RequestInfo("r", "m", DEFAULT_ORIGIN, ARRIVAL))
    request.on_failed(Overloaded("full"), ARRIVAL)
    labels = {"model_name": "m", "reason": "engine_queue"}
    assert metrics.registry.get_sample_value("quire_admission_rejections_total", labels) == 1
    assert metrics.registry.get_sample_value("quire_open_streams", {"model_name": "m", "protocol": "grpc"}) is None


def test_the_first_request_of_an_engine_creates_the_series_of_rare_events() -> None:
    shown = Shown()

    def count() -> int:
        return sum(len(family.samples) for family in shown.metrics.registry.collect())

    before = count()
    for reason in ("lost", "drained", "no-kvmanager"):
        shown.metrics.on_failover("m", "e", reason)
    for routed in ("only", "prefix", "load", "new", "least-loaded", "round-robin"):
        shown.metrics.on_routed("m", "e", routed, 3)
    shown.metrics.on_isolated("m", "e")
    shown.metrics.on_cancelled("m", "e", 0.1)
    shown.metrics.on_given_up("m")
    shown.request.on_deadline_exceeded(queued=True)
    shown.request.on_deadline_exceeded(queued=False)
    shown.request.on_slow_client()
    shown.request.on_failed(DeadlineExceeded("late"), ARRIVAL + 1)
    assert count() == before


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("sampling.top_p", "sampling.top_p"),
        ("logit_rules.logit_bias[7]", "logit_rules.logit_bias"),
        ("prompt.chat.messages[2].role", "prompt.chat.messages"),
        ("prompt.chat.tools[0].parameters", "other"),
    ],
)
def test_a_request_refused_for_a_field_counts_under_its_path(path: str, field: str) -> None:
    metrics = GatewayMetrics()
    metrics.on_request(RequestInfo("r", "m", DEFAULT_ORIGIN, ARRIVAL)).on_failed(InvalidField("no", path), ARRIVAL)
    labels = {"model_name": "m", "field": field}
    assert metrics.registry.get_sample_value("quire_invalid_requests_total", labels) == 1
