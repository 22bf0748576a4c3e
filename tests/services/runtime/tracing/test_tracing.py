"""A traced request leaves spans of all three services in one trace; others leave none, and no collector is needed."""

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from quire.v1 import gateway_pb2
from services.runtime.settings import InvalidSetting
from services.runtime.tracing.export import create_tracing
from services.runtime.tracing.spans import NO_SPAN, Tracing
from tests.load import prompt_request
from tests.running_quire import CALL_SECONDS, Answer, RunningQuire, start_quire
from tests.services.otlp_collector import CollectedSpan, Collector
from tests.timing import in_time

BLOCKS = 24
SERVICES = {
    "generate": "quire-gateway",
    "tokenize": "quire-gateway",
    "route": "quire-gateway",
    "attempt": "quire-gateway",
    "llm_request": "quire-engine",
    "queue": "quire-engine",
    "prefill": "quire-engine",
    "decode": "quire-engine",
    "hold blocks": "quire-kvmanager",
}
PARENTS = {
    "tokenize": "generate",
    "route": "generate",
    "attempt": "generate",
    "llm_request": "attempt",
    "queue": "llm_request",
    "prefill": "llm_request",
    "decode": "llm_request",
    "hold blocks": "llm_request",
}
# Two processes read one clock, which may be corrected in between.
CLOCK_SECONDS = 0.002


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    one = Collector()
    yield one
    one.close()


@pytest.fixture(scope="module")
def quire(tiny_model: Callable[[str], Path], collector: Collector) -> Iterator[RunningQuire]:
    """One that traces whom its clients trace, in a pool that two long answers do not fit into."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        one = start_quire(
            *("--model", str(tiny_model("llama")), "--device-blocks", str(BLOCKS), "--http-listen", "127.0.0.1:0"),
            *("--otlp-endpoint", collector.url, "--trace-sample-ratio", "0"),
        )
    yield one
    assert one.settled_pool().sequences == 0
    assert one.close() == 0


class Client:
    """A client's own span."""

    def __init__(self) -> None:
        self.trace_id, self.span_id = secrets.token_hex(16), secrets.token_hex(8)

    def parent(self, *, sampled: bool = True) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{'01' if sampled else '00'}"

    def begin(self, quire: RunningQuire, request: gateway_pb2.GenerateRequest, *, sampled: bool = True) -> Any:
        metadata = (("traceparent", self.parent(sampled=sampled)),)
        return quire.gateway.Generate(request, timeout=CALL_SECONDS, metadata=metadata)

    def generate(self, quire: RunningQuire, request: gateway_pb2.GenerateRequest, *, sampled: bool = True) -> Answer:
        return Answer.of(self.begin(quire, request, sampled=sampled))

    def spans(self, collector: Collector, *names: str) -> list[CollectedSpan]:
        """Wait until the trace is there, and what a request leaves at least."""
        return collector.wait_for(self.trace_id, *(names or SERVICES))


def by_name(spans: list[CollectedSpan]) -> dict[str, CollectedSpan]:
    named = {span.name: span for span in spans}
    assert len(named) == len(spans)
    return named


def test_a_request_is_one_trace_through_three_services(quire: RunningQuire, collector: Collector) -> None:
    client, request = Client(), prompt_request("Once upon a time, in a land far away", 6)
    request.request_id = "followed"
    answer = client.generate(quire, request)
    spans = by_name(client.spans(collector))
    assert {name: span.service for name, span in spans.items()} == SERVICES
    assert {name: spans[name].parent_id for name in PARENTS} == {
        name: spans[parent].span_id for name, parent in PARENTS.items()
    }
    assert spans["generate"].parent_id == client.span_id
    assert {span.fault for span in spans.values()} == {""}
    for name, parent in PARENTS.items():
        assert spans[parent].begun - CLOCK_SECONDS <= spans[name].begun <= spans[name].ended
        if name != "hold blocks":
            assert spans[name].ended <= spans[parent].ended + CLOCK_SECONDS
    # Blocks are granted before anything is computed, and come back with the Step that follows the last token.
    assert spans["hold blocks"].begun <= spans["prefill"].begun + CLOCK_SECONDS
    assert spans["decode"].ended <= spans["hold blocks"].ended + CLOCK_SECONDS
    assert spans["queue"].ended == pytest.approx(spans["prefill"].begun, abs=CLOCK_SECONDS)
    assert spans["prefill"].ended == pytest.approx(spans["decode"].begun, abs=CLOCK_SECONDS)
    named = [spans[name].attributes["gen_ai.request.id"] for name in ("generate", "llm_request", "hold blocks")]
    assert named == ["followed"] * 3
    for name in ("generate", "llm_request"):
        assert spans[name].attributes["gen_ai.usage.prompt_tokens"] == answer.started.prompt_tokens
        assert spans[name].attributes["gen_ai.usage.completion_tokens"] == 6
        assert spans[name].begun <= spans[name].event("first token").at <= spans[name].ended
    assert spans["hold blocks"].attributes["quire.kv.prompt_tokens"] == answer.started.prompt_tokens
    assert spans["hold blocks"].event("free").attributes["quire.kv.reason"] == "finished"


def test_a_cached_prompt_is_marked_in_the_span_of_its_blocks(quire: RunningQuire, collector: Collector) -> None:
    client, request = Client(), prompt_request("The same long prompt, said once and then said again, all of it.", 2)
    quire.generate(request)
    answer = client.generate(quire, request)
    granted = by_name(client.spans(collector))["hold blocks"].attributes
    assert granted["quire.kv.cached_tokens"] == answer.started.cached_tokens > 0
    assert granted["quire.kv.granted_blocks"] > granted["quire.kv.cached_tokens"] // 16


def test_http_continues_the_clients_trace_as_well(quire: RunningQuire, collector: Collector) -> None:
    client, body = Client(), {"model": "tiny-llama", "prompt": ["Once", "Twice"], "max_tokens": 3}
    headers = {"traceparent": client.parent()}
    answer = httpx.post(f"{quire.http_url}/v1/completions", json=body, headers=headers, timeout=CALL_SECONDS)
    assert answer.status_code == 200
    spans = client.spans(collector, *(name for name in SERVICES for _ in range(2)))
    roots = [span for span in spans if span.name == "generate"]
    assert {root.parent_id for root in roots} == {client.span_id}
    name = answer.headers["x-request-id"]
    assert {root.attributes["gen_ai.request.id"] for root in roots} == {f"{name}-0", f"{name}-1"}


@pytest.mark.parametrize("parent", ["not sampled", "none", "malformed"])
def test_an_unsampled_request_has_no_span(quire: RunningQuire, collector: Collector, parent: str) -> None:
    before = {span.trace_id for span in collector.all_spans()}
    client, followed = Client(), Client()
    if parent == "not sampled":
        client.generate(quire, prompt_request("Once", 3), sampled=False)
    else:
        metadata = (("traceparent", "00-nonsense"),) if parent == "malformed" else ()
        Answer.of(quire.gateway.Generate(prompt_request("Once", 3), timeout=CALL_SECONDS, metadata=metadata))
    followed.generate(quire, prompt_request("Once", 3))
    followed.spans(collector)  # of each process what it recorded before has come by then
    assert {span.trace_id for span in collector.all_spans()} - before == {followed.trace_id}


def test_a_preemption_shows_in_the_engines_span_and_in_the_managers(quire: RunningQuire, collector: Collector) -> None:
    def preempted() -> Client | None:
        """Return the one of two that was preempted; None where they met too late."""
        clients = [Client(), Client()]
        calls = [client.begin(quire, prompt_request("A long one", 240)) for client in clients]
        preemptions = [Answer.of(call).finished.timing.preemptions for call in calls]
        return clients[preemptions.index(1)] if sum(preemptions) == 1 else None

    spans = in_time(preempted, "one preempts the other, once").spans(collector, *SERVICES, "hold blocks")
    (request,) = [span for span in spans if span.name == "llm_request"]
    assert request.begun < request.event("preempted").at < request.event("resumed").at < request.ended
    first, second = [span for span in spans if span.name == "hold blocks"]
    assert first.event("preempt").attributes["quire.kv.preempted_for_group"] > 0
    assert first.ended <= second.begun
    assert {first.parent_id, second.parent_id} == {request.span_id}


def test_a_disconnected_client_ends_its_spans(quire: RunningQuire, collector: Collector) -> None:
    def left() -> dict[str, CollectedSpan] | None:
        """Return the spans; None where all had been answered before."""
        client = Client()
        call = client.begin(quire, prompt_request("Once", 300))
        next(call)
        call.cancel()
        spans = by_name(client.spans(collector, *(name for name in SERVICES if name != "decode")))
        return spans if spans["generate"].fault else None

    spans = in_time(left, "a client leaves before its answer is complete")
    assert spans["generate"].fault == "CANCELLED"
    assert spans["hold blocks"].event("free").attributes["quire.kv.reason"] == "cancelled"


def test_a_request_that_is_refused_is_a_failed_span(quire: RunningQuire, collector: Collector) -> None:
    client, request = Client(), prompt_request("Once", 3)
    request.sampling.temperature = -1
    with pytest.raises(grpc.RpcError):
        client.generate(quire, request)
    (span,) = client.spans(collector, "generate")
    assert span.fault == "INVALID_ARGUMENT"


def test_requests_run_without_a_collector_and_are_traced_again_after_its_return(
    quire: RunningQuire, collector: Collector
) -> None:
    collector.close()
    try:
        answers = [Client().generate(quire, prompt_request("Once", 3)) for _ in range(8)]
        assert {len(answer.token_ids) for answer in answers} == {3}
    finally:
        collector.open()
    client = Client()
    client.generate(quire, prompt_request("Once", 3))
    client.spans(collector)


def test_without_an_endpoint_nothing_is_recorded() -> None:
    tracing = create_tracing("gateway", "", 1.0)
    assert type(tracing) is Tracing
    span = tracing.start_span("generate", Client().parent())
    assert span is NO_SPAN
    with span.start_child("part") as part:
        part.add_event("something")
    assert part.trace_parent == ""


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4317", "unix:/x", "ftp://127.0.0.1"])
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(InvalidSetting, match=r"^otlp_endpoint must be a URL"):
        create_tracing("gateway", endpoint)
