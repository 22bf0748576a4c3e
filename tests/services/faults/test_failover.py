"""Streams fail over from a broken link and from a draining engine; tests/acceptance has more faults."""

import random
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire.v1 import gateway_pb2, gateway_pb2_grpc, kvmanager_pb2, kvmanager_pb2_grpc
from tests.faults import Processes, Streams, prompt
from tests.running.failover import NAMES, Failing, check_equal, cut, failovers, samples_of, streams
from tests.running_quire import CALL_SECONDS, Answer
from tests.services.otlp_collector import Collector

STREAMS = 32
TOKENS = 60
LONG = 300


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    processes = Processes()
    yield processes
    assert processes.end() == []


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    one = Collector()
    yield one
    one.close()


@pytest.fixture(scope="module")
def services(
    tiny_model: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
    processes: Processes,
    collector: Collector,
) -> Iterator[Failing]:
    with pytest.MonkeyPatch.context() as environment:
        for service in ("GATEWAY", "ENGINE", "KVMANAGER"):
            environment.setenv(f"QUIRE_{service}_OTLP_ENDPOINT", collector.url)
        environment.setenv("QUIRE_GATEWAY_TRACE_SAMPLE_RATIO", "0")
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        services = Failing(tmp_path_factory.mktemp("sockets"), str(tiny_model("llama")), keep=processes.keep)
        yield services
        assert services.close() == [0, 0]


def without_faults(services: Failing, requests: list[gateway_pb2.GenerateRequest]) -> list[Answer]:
    services.mend()
    running = services.run(requests)
    assert running.codes() == {}
    assert failovers(running.answers) == 0
    return running.answers


def check_after_failover(services: Failing, running: Streams, undisturbed: list[Answer]) -> None:
    assert running.codes() == {}
    check_equal(running.answers, undisturbed)
    services.check_that_nothing_is_left()
    assert failovers(running.answers) > 0


def two_samples(salt: str, *stop_tokens: int) -> gateway_pb2.GenerateRequest:
    request = prompt(0, 40, LONG, salt)
    request.sampling.temperature, request.sampling.seed, request.sampling.sample_count = 1.0, 5, 2
    request.stopping.stop_token_ids.extend(stop_tokens)
    return request


def test_a_finished_sample_stays_finished_when_the_other_fails_over(services: Failing) -> None:
    (free,) = without_faults(services, [two_samples("free")])
    first, second = (sample.token_ids for sample in samples_of(free))
    stop = max(first[:8], key=[*second, *first].index)  # the second sample has it late, or never

    def requests(salt: str) -> list[gateway_pb2.GenerateRequest]:
        """One at each engine, and a slow one, so that both still run at the fault."""
        slow = [prompt(number, 40, TOKENS, salt, slow=True) for number in range(len(NAMES))]
        return [*(two_samples(f"{engine} {salt}", stop) for engine in NAMES), *slow]

    undisturbed = without_faults(services, requests("undisturbed"))
    finished, long = (len(sample.token_ids) for sample in samples_of(undisturbed[0]))
    assert finished <= 8 < 100 < long
    running = services.run(requests("disturbed"))
    running.wait_for_tokens(60)
    cut(services, random.Random(0))
    check_after_failover(services, running, undisturbed)


def engine_of(services: Failing, request_id: str) -> str:
    kvmanager = kvmanager_pb2_grpc.KVManagerStub(services.manager.channel)
    explanation = kvmanager.Explain(kvmanager_pb2.ExplainRequest(request_id=request_id), timeout=10)
    return explanation.events[0].engine_id


def test_streams_of_a_drained_engine_continue_at_another_within_their_traces(
    services: Failing, collector: Collector
) -> None:
    undisturbed = without_faults(services, streams(STREAMS, TOKENS, "undisturbed"))
    trace_id = secrets.token_hex(16)
    request = prompt(0, 40, 2 * TOKENS, "traced", slow=True)
    request.request_id = "traced"
    metadata = (("traceparent", f"00-{trace_id}-{secrets.token_hex(8)}-01"),)
    stub = gateway_pb2_grpc.GatewayStub(services.gateway.channel)
    call = stub.Generate(request, timeout=CALL_SECONDS, metadata=metadata)
    next(call)
    running = services.run(streams(STREAMS, TOKENS, "disturbed"))
    running.wait_for_tokens(2 * STREAMS)
    drained = engine_of(services, "traced")
    assert services.engines[drained].close() == 0
    answer = Answer.of(call)
    assert len(answer.token_ids) == 2 * TOKENS
    assert answer.finished.timing.failovers == 1
    check_after_failover(services, running, undisturbed)

    spans = collector.wait_for(trace_id, "generate", "attempt", "attempt", "llm_request", "llm_request", "hold blocks")
    (root,), (first, second), parts = (
        [span for span in spans if span.name == name] for name in ("generate", "attempt", "llm_request")
    )
    assert first.parent_id == second.parent_id == root.span_id
    assert (first.fault, second.fault) == ("drained", "")
    assert first.attributes["quire.engine"] == drained == root.event("failover").attributes["quire.engine"]
    assert [part.parent_id for part in parts] == [first.span_id, second.span_id]
    assert root.attributes["quire.attempts"] == 2
