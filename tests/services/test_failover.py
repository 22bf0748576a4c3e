"""What happens to an engine, or to the gateway's link to it, while streams run: the streams go on at another one."""

import random
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire.v1 import gateway_pb2, gateway_pb2_grpc, kvmanager_pb2, kvmanager_pb2_grpc
from tests.failover import FAULTS, Failing, Fault, check_equal, cut, failovers, streams, told
from tests.faults import Processes, prompt
from tests.load import prompt_request
from tests.otlp_collector import Collector
from tests.running_quire import CALL_SECONDS, Answer

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
    """What all streams tell when nothing happens."""
    running = services.run(streams(STREAMS, TOKENS, "undisturbed"))
    assert running.codes() == {}
    assert failovers(running.answers) == 0
    return running.answers


def two_samples(salt: str, *stop_tokens: int) -> gateway_pb2.GenerateRequest:
    request = prompt(0, 40, LONG, salt)
    request.sampling.temperature, request.sampling.seed, request.sampling.sample_count = 1.0, 5, 2
    request.stopping.stop_token_ids.extend(stop_tokens)
    return request


def test_a_sample_that_had_ended_stays_ended_when_the_other_goes_on_elsewhere(services: Failing) -> None:
    services.mend()
    free = services.run([two_samples("free")])
    assert free.codes() == {}
    first, second = (sample.token_ids for sample in told(free.answers[0]))
    stop = max(first[:8], key=[*second, *first].index)  # the second sample has it late, or never
    undisturbed = services.run([two_samples("undisturbed", stop)])
    assert undisturbed.codes() == {}
    ended, long = (len(sample.token_ids) for sample in told(undisturbed.answers[0]))
    assert ended <= 8 < 100 < long
    running = services.run([two_samples("one", stop), two_samples("another", stop)])  # at each engine one
    running.wait_for_tokens(60)
    cut(services, random.Random(0))
    assert running.codes() == {}
    check_equal(running.answers, undisturbed.answers * 2)
    assert failovers(running.answers) > 0
    services.check_that_nothing_is_left()


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_streams_go_on_elsewhere_with_exactly_what_they_would_have_told(
    services: Failing, undisturbed: list[Answer], fault: Fault, request: pytest.FixtureRequest
) -> None:
    services.mend()
    draw = random.Random(request.node.name)
    running = services.run(streams(STREAMS, TOKENS, request.node.name))
    running.wait_for_tokens(draw.randrange(STREAMS, STREAMS * TOKENS // 2))
    fault(services, draw)
    assert running.codes() == {}
    check_equal(running.answers, undisturbed)
    assert failovers(running.answers) > 0
    services.check_that_nothing_is_left()


def test_both_attempts_are_parts_of_one_trace(services: Failing, collector: Collector) -> None:
    services.mend()
    trace_id = secrets.token_hex(16)
    stub = gateway_pb2_grpc.GatewayStub(services.gateway.channel)
    request = prompt_request("Once", 400)
    request.request_id = "moved"
    metadata = (("traceparent", f"00-{trace_id}-{secrets.token_hex(8)}-01"),)
    call = stub.Generate(request, timeout=CALL_SECONDS, metadata=metadata)
    next(call)
    kvmanager = kvmanager_pb2_grpc.KVManagerStub(services.manager.channel)
    story = kvmanager.Explain(kvmanager_pb2.ExplainRequest(request_id="moved"), timeout=10)
    left = story.events[0].engine_id
    services.engines[left].kill()
    assert len(Answer.of(call).token_ids) == 400
    spans = collector.wait_for(trace_id, "generate", "attempt", "attempt", "llm_request", "hold blocks")
    (root,), (first, second) = ([span for span in spans if span.name == name] for name in ("generate", "attempt"))
    (request_span,) = [span for span in spans if span.name == "llm_request"]  # the other engine took its own with it
    assert first.parent_id == second.parent_id == root.span_id
    assert (first.fault, second.fault) == ("lost", "")
    assert first.attributes["quire.engine"] == left == root.event("failover").attributes["quire.engine"]
    assert request_span.parent_id == second.span_id
    assert root.attributes["quire.attempts"] == 2
    services.check_that_nothing_is_left()
