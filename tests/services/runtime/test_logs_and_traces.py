"""Requests of a running Quire in its logs and traces: a line at the end, and one trace with spans of three services."""

import json
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from quire.v1 import gateway_pb2, kvmanager_pb2
from tests.faults import wait_until
from tests.load import prompt_request, slow_request
from tests.running_quire import CALL_SECONDS, Answer, RunningQuire, start_quire
from tests.scrape import Scrape
from tests.services.otlp_collector import CollectedSpan, Collector

RFC_3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
# Of 16 tokens. Two long answers do not fit.
BLOCKS = 12
LONG = 110
# The service and the parent of each span.
SPANS = {
    "generate": ("quire-gateway", ""),
    "tokenize": ("quire-gateway", "generate"),
    "route": ("quire-gateway", "generate"),
    "attempt": ("quire-gateway", "generate"),
    "llm_request": ("quire-engine", "attempt"),
    "queue": ("quire-engine", "llm_request"),
    "prefill": ("quire-engine", "llm_request"),
    "decode": ("quire-engine", "llm_request"),
    "hold blocks": ("quire-kvmanager", "llm_request"),
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
    """A Quire that traces the requests that its clients trace, and logs in JSON."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        one = start_quire(
            *("--model", str(tiny_model("llama")), "--device-blocks", str(BLOCKS), "--http-listen", "127.0.0.1:0"),
            *("--otlp-endpoint", collector.url, "--trace-sample-ratio", "0", "--log-format", "json"),
        )
    yield one
    assert one.settled_pool().sequences == 0
    assert one.close() == 0
    lines = [json.loads(line) for line in one.lines]
    assert {line["service"] for line in lines} == {"serve", "gateway", "engine", "kvmanager"}
    for line in lines:
        assert RFC_3339.fullmatch(line["time"])
        assert line.keys() >= {"level", "logger", "message"}
    assert "engine attached" in {line["message"] for line in lines if line["service"] == "kvmanager"}


def named(request: gateway_pb2.GenerateRequest, request_id: str) -> gateway_pb2.GenerateRequest:
    request.request_id = request_id
    return request


class Client:
    """A client with its own span."""

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
        """Wait for spans of these names, by default those of a request, and return the spans of the trace."""
        return collector.wait_for(self.trace_id, *(names or SPANS))


def by_name(spans: list[CollectedSpan]) -> dict[str, CollectedSpan]:
    named = {span.name: span for span in spans}
    assert len(named) == len(spans)
    return named


def ends(quire: RunningQuire, request_id: str, *services: str) -> dict[str, dict[str, Any]]:
    """Wait until these services, by default gateway and engine, have logged a request's end; return their lines."""
    services = services or ("engine", "gateway")
    found: list[dict[str, Any]] = []

    def logged() -> bool:
        lines = [json.loads(line) for line in list(quire.lines) if f'"{request_id}"' in line]
        found[:] = [line for line in lines if line["message"] == "request ended"]
        return {line["service"] for line in found} >= set(services)

    wait_until(logged, "the end of the request is logged")
    own = [line for line in found if line["service"] in services]
    assert sorted(line["service"] for line in own) == sorted(services), "one line each"
    return {line["service"]: line for line in own}


def test_gateway_and_engine_log_the_end_of_a_request_in_one_line_each(quire: RunningQuire) -> None:
    answer = quire.generate(named(prompt_request("Once upon a time", 40), "whole"))
    lines = ends(quire, "whole")
    timing, usage = answer.finished.timing, answer.finished.usage
    common = {
        "request_id": "whole",
        "model": "tiny-llama",
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "generation_tokens": 40,
        "finish_reason": "length",
        "preemptions": 0,
        "queue_seconds": pytest.approx(timing.queued.ToTimedelta().total_seconds(), abs=1e-5),
    }
    assert lines["engine"].items() >= common.items()
    ending = {"protocol": "grpc", "status": "OK", "attempts": 1, "client_gone": False}
    assert lines["gateway"].items() >= (common | ending).items()
    assert lines["gateway"]["ttft_seconds"] <= lines["gateway"]["e2e_seconds"]
    blocks = -(-(usage.prompt_tokens + 39) // 16)
    assert lines["engine"]["held_blocks"] >= blocks


def test_a_request_is_one_trace_through_three_services(quire: RunningQuire, collector: Collector) -> None:
    client, request = Client(), named(prompt_request("Once upon a time, in a land far away", 6), "followed")
    answer = client.generate(quire, request)
    assert ends(quire, "followed")["gateway"]["trace_id"] == client.trace_id
    spans = by_name(client.spans(collector))
    assert {name: span.service for name, span in spans.items()} == {name: SPANS[name][0] for name in SPANS}
    assert spans["generate"].parent_id == client.span_id
    assert {span.fault for span in spans.values()} == {""}
    for name, (_, parent) in list(SPANS.items())[1:]:
        assert spans[name].parent_id == spans[parent].span_id
        assert spans[parent].begun - CLOCK_SECONDS <= spans[name].begun <= spans[name].ended
        if name != "hold blocks":
            assert spans[name].ended <= spans[parent].ended + CLOCK_SECONDS
    # Blocks are granted before the prefill, and freed by the Step that follows the last token.
    assert spans["hold blocks"].begun <= spans["prefill"].begun + CLOCK_SECONDS
    assert spans["decode"].ended <= spans["hold blocks"].ended + CLOCK_SECONDS
    assert spans["queue"].ended == pytest.approx(spans["prefill"].begun, abs=CLOCK_SECONDS)
    assert spans["prefill"].ended == pytest.approx(spans["decode"].begun, abs=CLOCK_SECONDS)
    ids = [spans[name].attributes["gen_ai.request.id"] for name in ("generate", "llm_request", "hold blocks")]
    assert ids == ["followed"] * 3
    for name in ("generate", "llm_request"):
        assert spans[name].attributes["gen_ai.usage.prompt_tokens"] == answer.started.prompt_tokens
        assert spans[name].attributes["gen_ai.usage.completion_tokens"] == 6
        assert spans[name].begun <= spans[name].event("first token").at <= spans[name].ended
    for phase, name in (("queue", "queue"), ("prefill", "model_prefill"), ("decode", "model_decode")):
        seconds = spans["llm_request"].attributes[f"gen_ai.latency.time_in_{name}"]
        assert seconds == pytest.approx(spans[phase].ended - spans[phase].begun, abs=CLOCK_SECONDS)
    assert spans["hold blocks"].attributes["quire.kv.prompt_tokens"] == answer.started.prompt_tokens
    assert spans["hold blocks"].event("free").attributes["quire.kv.reason"] == "finished"


def test_a_cached_prompt_is_marked_in_the_span_of_its_blocks(quire: RunningQuire, collector: Collector) -> None:
    client, request = Client(), prompt_request("The same long prompt, sent once and then sent again, all of it.", 2)
    quire.generate(request)
    answer = client.generate(quire, request)
    granted = by_name(client.spans(collector))["hold blocks"].attributes
    assert granted["quire.kv.cached_tokens"] == answer.started.cached_tokens > 0
    assert granted["quire.kv.granted_blocks"] > granted["quire.kv.cached_tokens"] // 16


def test_an_http_response_has_the_id_of_its_log_lines_explanation_and_spans(
    quire: RunningQuire, collector: Collector
) -> None:
    client, body = Client(), {"model": "tiny-llama", "prompt": ["Once", "Twice"], "max_tokens": 3}
    headers = {"traceparent": client.parent(), "x-request-id": "from-outside"}
    answer = httpx.post(f"{quire.http_url}/v1/completions", json=body, headers=headers, timeout=CALL_SECONDS)
    assert answer.status_code == 200
    name = answer.json()["id"]
    assert answer.headers["x-request-id"] == "from-outside"
    spans = client.spans(collector, *(name for name in SPANS for _ in range(2)))
    roots = [span for span in spans if span.name == "generate"]
    assert {root.parent_id for root in roots} == {client.span_id}
    assert {root.attributes["gen_ai.request.id"] for root in roots} == {f"{name}-0", f"{name}-1"}
    assert {root.attributes["quire.client_request_id"] for root in roots} == {"from-outside"}
    line = ends(quire, f"{name}-0")["gateway"]
    assert (line["protocol"], line["client_request_id"]) == ("http", "from-outside")
    explained = quire.kvmanager.Explain(kvmanager_pb2.ExplainRequest(request_id=f"{name}-0"), timeout=CALL_SECONDS)
    assert {event.request_id for event in explained.events} == {f"{name}-0"}


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": "Once", "colour": 1}, "colour"),
        ("/v1/messages", {"messages": [], "max_tokens": 1}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "model": "other"}, "model"),
    ],
)
def test_a_refused_http_request_is_found_by_the_name_that_its_client_gave(
    quire: RunningQuire, path: str, body: dict[str, Any], field: str
) -> None:
    name = f"refused-{field}"
    answer = httpx.post(f"{quire.http_url}{path}", json=body, headers={"x-request-id": name}, timeout=CALL_SECONDS)
    assert answer.status_code in (400, 404)
    quire.output.wait_for(name)
    (line,) = [json.loads(one) for one in list(quire.lines) if f'"{name}"' in one and "request refused" in one]
    assert (line["client_request_id"], line["path"], line["field"]) == (name, path, field)
    assert line["status_code"] == answer.status_code


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
    followed.spans(collector)  # each process exports its spans in order
    assert {span.trace_id for span in collector.all_spans()} - before == {followed.trace_id}


def test_a_preemption_is_in_the_spans_of_engine_and_kv_manager(quire: RunningQuire, collector: Collector) -> None:
    clients = [Client(), Client()]
    calls = [client.begin(quire, slow_request("A long one", LONG)) for client in clients]
    preemptions = [Answer.of(call).finished.timing.preemptions for call in calls]
    assert sorted(preemptions) == [0, 1]
    spans = clients[preemptions.index(1)].spans(collector, *SPANS, "hold blocks")
    (request,) = [span for span in spans if span.name == "llm_request"]
    assert request.begun < request.event("preempted").at < request.event("resumed").at < request.ended
    first, second = [span for span in spans if span.name == "hold blocks"]
    assert first.event("preempt").attributes["quire.kv.preempted_for_group"] > 0
    assert first.ended <= second.begun
    assert {first.parent_id, second.parent_id} == {request.span_id}


def test_a_disconnected_client_is_a_cancelled_request_in_logs_and_spans(
    quire: RunningQuire, collector: Collector
) -> None:
    client = Client()
    call = client.begin(quire, named(slow_request("Once", LONG), "disconnected"))
    next(call)
    call.cancel()
    lines = ends(quire, "disconnected")
    ending = {"status": "CANCELLED", "client_gone": True, "finish_reason": "abort"}
    assert lines["gateway"].items() >= ending.items()
    assert lines["engine"]["finish_reason"] == "cancelled"
    assert lines["engine"]["held_blocks"] > 0
    spans = by_name(client.spans(collector, *(name for name in SPANS if name != "decode")))
    assert spans["generate"].fault == "CANCELLED"
    assert spans["hold blocks"].event("free").attributes["quire.kv.reason"] == "cancelled"


def test_an_exceeded_deadline_is_logged(quire: RunningQuire) -> None:
    request = named(slow_request("Once", LONG), "late")
    request.timeout.FromMilliseconds(150)
    with suppress(grpc.RpcError):
        quire.generate(request)
    # On a slow machine the request may not reach the engine.
    assert ends(quire, "late", "gateway")["gateway"]["status"] == "DEADLINE_EXCEEDED"


def test_a_refused_request_logs_the_field_without_its_value_and_fails_its_span(
    quire: RunningQuire, collector: Collector
) -> None:
    client, request = Client(), named(prompt_request("Once", 3, ignore_eos=False), "refused")
    request.constraint.regex = "(my own secret"
    with pytest.raises(grpc.RpcError) as refused:
        client.generate(quire, request)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    lines = ends(quire, "refused")
    assert lines["gateway"]["field"] == "constraint.regex"
    assert lines["engine"]["status"] == "refused"
    assert not [line for line in quire.lines if "my own secret" in line]
    (span,) = [span for span in client.spans(collector, "generate") if span.name == "generate"]
    assert span.fault == "INVALID_ARGUMENT"


def test_requests_run_without_a_collector_and_are_traced_after_its_return(
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


def test_no_log_line_was_dropped(quire: RunningQuire) -> None:
    for url in quire.metrics_urls.values():
        assert Scrape.of(url).value("quire_log_lines_dropped_total") == 0
