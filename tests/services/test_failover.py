"""Faults of an engine or of the gateway's link to it while streams run: the streams fail over to another engine."""

import random
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire.v1 import gateway_pb2, gateway_pb2_grpc, kvmanager_pb2, kvmanager_pb2_grpc
from tests.faults import Processes, prompt
from tests.running.failover import FAULTS, NAMES, Failing, Fault, check_equal, cut, failovers, streams, told
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


@pytest.fixture(scope="module")
def undisturbed(services: Failing) -> list[Answer]:
    """The answers without a fault."""
    return without_faults(services, streams(STREAMS, TOKENS, "undisturbed"))


def without_faults(services: Failing, requests: list[gateway_pb2.GenerateRequest]) -> list[Answer]:
    services.mend()
    running = services.run(requests)
    assert running.codes() == {}
    assert failovers(running.answers) == 0
    return running.answers


def check_under(
    services: Failing,
    fault: Callable[[], None],
    tokens: int,
    requests: list[gateway_pb2.GenerateRequest],
    undisturbed: list[Answer],
) -> None:
    """Check that a fault after `tokens` tokens of all streams changes no answer."""
    services.mend()
    running = services.run(requests)
    running.wait_for_tokens(tokens)
    fault()
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
    first, second = (sample.token_ids for sample in told(free))
    stop = max(first[:8], key=[*second, *first].index)  # the second sample has it late, or never

    def requests(salt: str) -> list[gateway_pb2.GenerateRequest]:
        """One at each engine, and beside each a slow one, so that both still run at the fault."""
        slow = [prompt(number, 40, TOKENS, salt, slow=True) for number in range(len(NAMES))]
        return [*(two_samples(f"{engine} {salt}", stop) for engine in NAMES), *slow]

    undisturbed = without_faults(services, requests("undisturbed"))
    finished, long = (len(sample.token_ids) for sample in told(undisturbed[0]))
    assert finished <= 8 < 100 < long
    check_under(services, lambda: cut(services, random.Random(0)), 60, requests("disturbed"), undisturbed)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_streams_fail_over_without_a_change_of_their_answers(
    services: Failing, undisturbed: list[Answer], fault: Fault, request: pytest.FixtureRequest
) -> None:
    name = request.node.name
    draw = random.Random(name)
    tokens = draw.randrange(STREAMS, STREAMS * TOKENS // 2)
    check_under(
        services,
        lambda: fault(services, draw),
        tokens,
        streams(STREAMS, TOKENS, name),
        undisturbed,
    )


def fail_over(services: Failing) -> tuple[str, str]:
    """Run a stream whose engine is killed; return the stream's trace and the name of that engine."""
    services.mend()
    trace_id = secrets.token_hex(16)
    request = prompt(0, 40, TOKENS, "traced", slow=True)
    request.request_id = "traced"
    metadata = (("traceparent", f"00-{trace_id}-{secrets.token_hex(8)}-01"),)
    stub = gateway_pb2_grpc.GatewayStub(services.gateway.channel)
    call = stub.Generate(request, timeout=CALL_SECONDS, metadata=metadata)
    next(call)
    kvmanager = kvmanager_pb2_grpc.KVManagerStub(services.manager.channel)
    explanation = kvmanager.Explain(kvmanager_pb2.ExplainRequest(request_id="traced"), timeout=10)
    lost = explanation.events[0].engine_id
    services.engines[lost].kill()
    answer = Answer.of(call)
    assert len(answer.token_ids) == TOKENS
    assert answer.finished.timing.failovers == 1
    return trace_id, lost


def test_both_attempts_are_parts_of_one_trace(services: Failing, collector: Collector) -> None:
    trace_id, lost = fail_over(services)
    spans = collector.wait_for(trace_id, "generate", "attempt", "attempt", "llm_request", "hold blocks")
    (root,), (first, second) = ([span for span in spans if span.name == name] for name in ("generate", "attempt"))
    (request_span,) = [span for span in spans if span.name == "llm_request"]  # the other engine took its own with it
    assert first.parent_id == second.parent_id == root.span_id
    assert (first.fault, second.fault) == ("lost", "")
    assert first.attributes["quire.engine"] == lost == root.event("failover").attributes["quire.engine"]
    assert request_span.parent_id == second.span_id
    assert root.attributes["quire.attempts"] == 2
    services.check_that_nothing_is_left()
