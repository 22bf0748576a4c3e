"""What happens to an engine, or to the gateway's link to it, while streams run: the streams go on at another one."""

import random
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from quire.v1 import gateway_pb2, gateway_pb2_grpc, kvmanager_pb2, kvmanager_pb2_grpc
from tests.faults import Processes, prompt
from tests.load import prompt_request
from tests.running.deadly_engine import DEADLY_SEED
from tests.running.failover import FAULTS, NAMES, Failing, Fault, check_equal, cut, failovers, streams, told
from tests.running_quire import CALL_SECONDS, Answer
from tests.scrape import Scrape
from tests.services.otlp_collector import Collector

STREAMS = 32
TOKENS = 60
LONG = 300
NEIGHBOURS = 6
ATTEMPTS = 5  # at a fault while streams run: they may be over before it

MakeRequests = Callable[[str], list[gateway_pb2.GenerateRequest]]


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
    return without_faults(services, lambda salt: streams(STREAMS, TOKENS, salt))


def without_faults(services: Failing, requests: MakeRequests) -> list[Answer]:
    """Run requests, each made for a salt, until nothing happens to them: an engine that pauses counts as gone soon."""
    services.mend()
    for attempt in range(ATTEMPTS):
        running = services.run(requests(f"undisturbed {attempt}"))
        assert running.codes() == {}
        if failovers(running.answers) == 0:
            return running.answers
    raise AssertionError("engines are lost by themselves")


def check_under(
    services: Failing, fault: Callable[[], None], tokens: int, requests: MakeRequests, undisturbed: list[Answer]
) -> None:
    """Check that a fault after so many tokens changes nothing of what is told; once, some streams have to feel it."""
    for attempt in range(ATTEMPTS):
        services.mend()
        running = services.run(requests(f"disturbed {attempt}"))
        running.wait_for_tokens(tokens)
        fault()
        assert running.codes() == {}
        check_equal(running.answers, undisturbed)
        services.check_that_nothing_is_left()
        if failovers(running.answers) > 0:
            return
    raise AssertionError("no stream was lost")


def two_samples(salt: str, *stop_tokens: int) -> gateway_pb2.GenerateRequest:
    request = prompt(0, 40, LONG, salt)
    request.sampling.temperature, request.sampling.seed, request.sampling.sample_count = 1.0, 5, 2
    request.stopping.stop_token_ids.extend(stop_tokens)
    return request


def test_a_sample_that_had_ended_stays_ended_when_the_other_goes_on_elsewhere(services: Failing) -> None:
    (free,) = without_faults(services, lambda salt: [two_samples(f"free {salt}")])
    first, second = (sample.token_ids for sample in told(free))
    stop = max(first[:8], key=[*second, *first].index)  # the second sample has it late, or never
    undisturbed = without_faults(services, lambda salt: [two_samples(salt, stop)])
    ended, long = (len(sample.token_ids) for sample in told(undisturbed[0]))
    assert ended <= 8 < 100 < long

    def at_each_engine_one(salt: str) -> list[gateway_pb2.GenerateRequest]:
        return [two_samples(f"{engine} {salt}", stop) for engine in NAMES]

    check_under(services, lambda: cut(services, random.Random(0)), 60, at_each_engine_one, undisturbed * 2)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_streams_go_on_elsewhere_with_exactly_what_they_would_have_told(
    services: Failing, undisturbed: list[Answer], fault: Fault, request: pytest.FixtureRequest
) -> None:
    name = request.node.name
    draw = random.Random(name)
    tokens = draw.randrange(STREAMS, STREAMS * TOKENS // 2)
    check_under(
        services,
        lambda: fault(services, draw),
        tokens,
        lambda salt: streams(STREAMS, TOKENS, f"{name} {salt}"),
        undisturbed,
    )


def move(services: Failing) -> tuple[str, str]:
    """Run a stream whose engine is killed under it; return the stream's trace, and the name of that engine."""
    stub = gateway_pb2_grpc.GatewayStub(services.gateway.channel)
    kvmanager = kvmanager_pb2_grpc.KVManagerStub(services.manager.channel)
    for attempt in range(ATTEMPTS):
        services.mend()
        trace_id = secrets.token_hex(16)
        request = prompt_request("Once", 400)
        request.request_id = f"moved {attempt}"
        metadata = (("traceparent", f"00-{trace_id}-{secrets.token_hex(8)}-01"),)
        call = stub.Generate(request, timeout=CALL_SECONDS, metadata=metadata)
        next(call)
        story = kvmanager.Explain(kvmanager_pb2.ExplainRequest(request_id=request.request_id), timeout=10)
        left = story.events[0].engine_id
        services.engines[left].kill()
        answer = Answer.of(call)
        assert len(answer.token_ids) == 400
        if answer.finished.timing.failovers == 1:
            return trace_id, left
    raise AssertionError("the stream was over whenever its engine was killed")


def test_both_attempts_are_parts_of_one_trace(services: Failing, collector: Collector) -> None:
    trace_id, left = move(services)
    spans = collector.wait_for(trace_id, "generate", "attempt", "attempt", "llm_request", "hold blocks")
    (root,), (first, second) = ([span for span in spans if span.name == name] for name in ("generate", "attempt"))
    (request_span,) = [span for span in spans if span.name == "llm_request"]  # the other engine took its own with it
    assert first.parent_id == second.parent_id == root.span_id
    assert (first.fault, second.fault) == ("lost", "")
    assert first.attributes["quire.engine"] == left == root.event("failover").attributes["quire.engine"]
    assert request_span.parent_id == second.span_id
    assert root.attributes["quire.attempts"] == 2
    services.check_that_nothing_is_left()


def test_a_request_that_ends_engines_ends_three_and_fails_while_the_others_go_on(services: Failing) -> None:
    undisturbed = without_faults(services, lambda salt: [prompt(n, 30, TOKENS, salt) for n in range(NEIGHBOURS)])
    services.mend()
    deadly = prompt(99, 30, TOKENS, "deadly")
    deadly.sampling.seed = DEADLY_SEED
    running = services.run([*(prompt(n, 30, TOKENS, "neighbours") for n in range(NEIGHBOURS)), deadly])
    assert services.restart_while_streams_run() == 3
    assert running.codes() == {NEIGHBOURS: grpc.StatusCode.INTERNAL}
    assert "3 engines were lost one after the other" in str(running.failures()[NEIGHBOURS])
    check_equal(running.answers[:NEIGHBOURS], undisturbed)
    shown = Scrape.of(services.gateway.metrics_url)
    assert shown.value("quire_requests_given_up_total") == 1
    assert sum(shown.values("quire_isolated_attempts_total", "engine").values()) >= 1
    services.check_that_nothing_is_left()
