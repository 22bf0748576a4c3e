"""Faults of the engine, the KV manager and their connection, up to fifty times at random moments, under streams.

Each round has its own seed and cache salt, so that prompts are computed during the fault too. Most faults run on the
tiny Llama, because steps of the demo model take most of the time.
"""

import queue
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from quire.v1 import engine_pb2, engine_pb2_grpc, gateway_pb2
from tests import faults
from tests.acceptance.conftest import Record
from tests.acceptance.repetitions import repetitions
from tests.faults import LEASE_SECONDS, WITHOUT_KEEPALIVE, Fault, Processes, Services, prompt, prompts, wait_until

ROUNDS = repetitions(50)
STREAMS = {"demo": 8, "tiny": 16}
TOKENS = {"demo": 40, "tiny": 120}
FEW_BLOCKS = 80
# Keepalive: a ping after 10 seconds of silence, and 5 seconds for the response.
KEEPALIVE_SECONDS = 15


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    processes = Processes()
    yield processes
    assert processes.end() == []


@pytest.fixture(scope="module")
def start(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, processes: Processes
) -> Callable[..., Services]:
    """Starts services on the demo model or the tiny Llama."""
    models = {"demo": "demo", "tiny": str(tiny_model("llama"))}

    def start(model: str = "tiny", device_blocks: int = 1024) -> Services:
        return Services(tmp_path_factory.mktemp("sockets"), models[model], device_blocks, keep=processes.keep)

    return start


@pytest.fixture(scope="module")
def services(start: Callable[..., Services], request: pytest.FixtureRequest) -> Iterator[Services]:
    services = start(request.param)
    yield services
    assert services.close() == [0, 0, 0]


def begin_round(services: Services, name: str, model: str, number: int) -> tuple[random.Random, faults.Streams]:
    """Run all streams up to a random moment before their last third."""
    draw = random.Random(f"{name} {number}")
    streams = services.run(prompts(STREAMS[model], TOKENS[model], f"{name} {number}"))
    streams.wait_for_tokens(draw.randrange(STREAMS[model] * TOKENS[model] * 2 // 3))
    return draw, streams


@pytest.mark.parametrize(
    ("services", "model", "fault"),
    [
        pytest.param("demo", "demo", faults.kill_the_manager, id="demo model, the manager is killed"),
        pytest.param("tiny", "tiny", faults.kill_the_manager, id="the manager is killed"),
        pytest.param("tiny", "tiny", faults.cut_the_connection, id="the connection is cut"),
        pytest.param("tiny", "tiny", faults.deliver_late, id="a Step of the old session is late"),
        pytest.param("tiny", "tiny", faults.attach_late, id="an attempt to attach is late"),
        pytest.param("tiny", "tiny", faults.stop_the_manager, id="the manager is stopped"),
        pytest.param("tiny", "tiny", faults.stop_the_engine, id="the engine is stopped until its pool is dropped"),
        pytest.param("tiny", "tiny", faults.kill_another_engine, id="another engine is killed"),
    ],
    indirect=["services"],
)
def test_a_fault_changes_no_token(services: Services, model: str, fault: Fault, record: Record) -> None:
    expected = services.run(prompts(STREAMS[model], TOKENS[model], "undisturbed")).tokens()
    running = 0
    for rounds in range(1, ROUNDS + 1):
        draw, streams = begin_round(services, fault.__name__, model, rounds)
        running += streams.running()
        fault(services, draw)
        assert streams.tokens() == expected
        services.check_that_nothing_is_left()
        record(
            model=model,
            rounds=rounds,
            streams=rounds * STREAMS[model],
            tokens=rounds * STREAMS[model] * TOKENS[model],
            streams_running_at_the_fault=running,
            other_tokens=0,
            recomputed_tokens=int(services.engine_metric("quire_recomputed_tokens_total")),
            held_afterwards=services.pool().device.held,
        )


@pytest.mark.parametrize("services", ["tiny"], indirect=True)
@pytest.mark.parametrize("away", [Services.manager_away, Services.connection_away], ids=["killed", "cut off"])
def test_requests_cancelled_without_a_manager_hold_no_blocks_afterwards(
    services: Services, away: faults.Away, record: Record
) -> None:
    expected = services.run(prompts(STREAMS["tiny"], TOKENS["tiny"], "undisturbed")).tokens()
    cancelled_streams = 0
    for number in range(ROUNDS):
        draw, streams = begin_round(services, f"{away.__name__} cancel", "tiny", number)
        streams.wait_for_starts()
        with away(services):
            cancelled = faults.cancel_some(services, streams, draw)
        faults.wait_for_sequences(services, STREAMS["tiny"] - len(cancelled))
        assert streams.codes() == dict.fromkeys(cancelled, grpc.StatusCode.CANCELLED)
        for kept in set(range(STREAMS["tiny"])) - set(cancelled):
            assert streams.answers[kept].token_ids == expected[kept]
        services.check_that_nothing_is_left()
        cancelled_streams += len(cancelled)
        record(model="tiny", rounds=number + 1, cancelled=cancelled_streams, held_afterwards=0)


@pytest.mark.parametrize("services", ["tiny"], indirect=True)
def test_blocks_of_requests_that_end_while_the_connection_breaks_are_freed(services: Services, record: Record) -> None:
    expected = services.run(prompts(400, 6, "undisturbed")).tokens()
    assert faults.cut_while_requests_come_and_go(services, prompts(400, 6, "come and go"), cuts=ROUNDS) == expected
    services.check_that_nothing_is_left()
    record(model="tiny", rounds=ROUNDS, requests=400, held_afterwards=0)


@pytest.mark.parametrize("fault", [faults.kill_the_manager, faults.cut_the_connection], ids=["killed", "cut off"])
def test_a_fault_does_not_change_the_order_of_free_blocks(
    start: Callable[..., Services], fault: Fault, record: Record
) -> None:
    with ThreadPoolExecutor() as starters:
        twin, disturbed = starters.map(lambda _: start(device_blocks=FEW_BLOCKS), range(2))
    for number in range(ROUNDS):
        draw = random.Random(f"twins {fault.__name__} {number}")
        length, max_tokens, moment = draw.randint(1, 600), draw.randint(40, 120), draw.random()
        request = prompt(draw.randrange(12), length, max_tokens, slow=True)  # so that it runs during the fault
        shown = []
        for services, disturb in ((twin, False), (disturbed, True)):
            stream = services.run([request])
            stream.wait_for_tokens(1)
            ((_, table),) = services.sequences().items()
            stream.wait_for_tokens(1 + int(moment * 0.6 * max_tokens))
            if disturb:
                fault(services, draw)
            (tokens,) = stream.tokens()
            wait_until(lambda services=services: services.pool().sequences == 0, "the stream has ended")
            shown.append((table[: (length + 15) // 16], tokens, services.block_map()))
        assert shown[0] == shown[1]
        record(model="tiny", rounds=number + 1, blocks=FEW_BLOCKS)
    for services in (twin, disturbed):
        services.check_that_nothing_is_left()
        assert services.close() == [0, 0, 0]


# The real keepalive


@pytest.mark.parametrize("services", ["tiny"], indirect=True)
def test_bytes_held_for_longer_than_the_keepalive_change_no_token(services: Services, record: Record) -> None:
    expected = services.run(prompts(STREAMS["tiny"], TOKENS["tiny"], "undisturbed")).tokens()
    _, streams = begin_round(services, "held", "tiny", 0)
    begun = time.monotonic()
    with services.reattaching():
        held = services.forwarder.hold(answers=True)
    record(seconds_until_attached_again=round(time.monotonic() - begun, 1))
    assert streams.running() > 0
    before = services.pool().session
    services.forwarder.release(held)
    services.forwarder.end(held)
    assert streams.tokens() == expected
    assert services.pool().session == before
    services.check_that_nothing_is_left()


@pytest.mark.parametrize("services", ["tiny"], indirect=True)
def test_an_engine_stopped_for_longer_than_keepalive_and_lease_continues_its_streams(
    services: Services, record: Record
) -> None:
    """The test replaces the gateway, whose keepalive would disconnect the engine too."""
    expected = services.run(prompts(STREAMS["tiny"], 600, "undisturbed")).tokens()
    with grpc.insecure_channel(services.engine.address, options=WITHOUT_KEEPALIVE) as channel:
        requests: queue.SimpleQueue[engine_pb2.ServeRequest | None] = queue.SimpleQueue()
        for number, request in enumerate(prompts(STREAMS["tiny"], 600, "stopped")):
            requests.put(submission(str(number), request))
        call = engine_pb2_grpc.EngineStub(channel).Serve(iter(requests.get, None), timeout=120)
        tokens: dict[str, list[int]] = {str(number): [] for number in range(STREAMS["tiny"])}
        finished: dict[str, engine_pb2.RequestFinished] = {}
        stopped = False
        for response in call:
            for new in response.step.tokens:
                tokens[new.request_id] += new.token_ids
            finished |= {one.request_id: one for one in response.step.finished}
            if not stopped and sum(map(len, tokens.values())) > STREAMS["tiny"] * 100:
                stopped = True
                before = services.pool()
                seconds = stop_until_the_pool_is_dropped(services)
                after = services.pool()
            if len(finished) == STREAMS["tiny"]:
                break
        requests.put(None)
    record(seconds_until_the_pool_was_dropped=round(seconds, 1))
    assert seconds < KEEPALIVE_SECONDS + LEASE_SECONDS + 2
    assert after.incarnation == before.incarnation
    assert after.session != before.session
    assert [tokens[str(number)] for number in range(STREAMS["tiny"])] == expected
    assert sum(one.recomputed_tokens for one in finished.values()) == 0
    services.check_that_nothing_is_left()


def submission(request_id: str, request: gateway_pb2.GenerateRequest) -> engine_pb2.ServeRequest:
    """Build the gateway's submission of a request."""
    return engine_pb2.ServeRequest(
        submission=engine_pb2.Submission(
            request_id=request_id,
            attempt=1,
            prompt_token_ids=request.prompt.token_ids.ids,
            sampling=request.sampling,
            stopping=request.stopping,
            salt=request.cache.salt.encode(),
        )
    )


def stop_until_the_pool_is_dropped(services: Services) -> float:
    """Stop the engine until its pool is dropped, then continue it; return the seconds until the drop."""
    begun = time.monotonic()
    with services.reattaching():
        services.engine.process.send_signal(signal.SIGSTOP)
        try:
            wait_until(lambda: "first" not in services.pools(), "the pool is dropped", 30)
            seconds = time.monotonic() - begun
        finally:
            services.engine.process.send_signal(signal.SIGCONT)
    return seconds
