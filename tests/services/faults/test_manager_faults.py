"""Faults of the KV manager, of the engine and of their connection while streams run: no token changes."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import grpc
import pytest

from tests import faults
from tests.faults import Away, Fault, Processes, Services, Streams, prompt, prompts, wait_until

STREAMS = 8
TOKENS = 80


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    processes = Processes()
    yield processes
    assert processes.end() == []


@pytest.fixture(scope="module")
def all_services(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, processes: Processes
) -> Iterator[Services]:
    services = Services(tmp_path_factory.mktemp("sockets"), str(tiny_model("llama")), keep=processes.keep)
    yield services
    assert services.close() == [0, 0, 0]


@pytest.fixture(scope="module")
def expected(all_services: Services) -> list[list[int]]:
    tokens = all_services.run(prompts(STREAMS, TOKENS, "undisturbed")).tokens()
    wait_until(lambda: all_services.pool().sequences == 0, "all sequences are freed")
    return tokens


@pytest.fixture
def services(all_services: Services, expected: list[list[int]]) -> Iterator[Services]:
    yield all_services
    all_services.check_that_nothing_is_left()


@pytest.fixture
def draw(request: pytest.FixtureRequest) -> random.Random:
    """Random numbers, seeded by the test's name."""
    return random.Random(request.node.name)


@pytest.fixture
def streams(services: Services, draw: random.Random, request: pytest.FixtureRequest) -> Streams:
    """All streams, at a random moment before their last third."""
    streams = services.run(prompts(STREAMS, TOKENS, request.node.name, slow=True))
    streams.wait_for_tokens(draw.randrange(STREAMS * TOKENS * 2 // 3))
    return streams


# A killed KV manager


def test_a_killed_manager_changes_no_token_and_no_cached_prefix(
    services: Services, draw: random.Random, expected: list[list[int]]
) -> None:
    old = prompt(1000, 200, 8, "killed")
    services.generate(old)
    wait_until(lambda: services.pool().sequences == 0, "all sequences are freed")
    requests = prompts(STREAMS, TOKENS, "killed", slow=True)
    streams = services.run(requests)
    streams.wait_for_tokens(draw.randrange(STREAMS * TOKENS // 3))
    with services.manager_away():
        assert services.engine_metric("quire_num_requests_running") > 0
    assert streams.tokens() == expected
    assert services.generate(old).started.cached_tokens == 192
    again = services.run(prompts(STREAMS, TOKENS, "killed"))
    assert again.tokens() == expected
    assert [answer.started.cached_tokens for answer in again.answers] == [
        (answer.started.prompt_tokens - 1) // 16 * 16 for answer in streams.answers
    ]


def test_an_idle_manager_that_is_killed_has_the_same_blocks_afterwards(services: Services) -> None:
    before, counts = services.block_map(), services.pool().device
    with services.manager_away():
        pass
    assert services.block_map() == before
    assert services.pool().device == counts


# Faults while streams run


@pytest.mark.parametrize(
    "fault",
    [faults.deliver_late, faults.attach_late, faults.stop_the_engine, partial(faults.stop_the_manager, seconds=1)],
    ids=[
        "a Step of the old session arrives late",
        "an attempt to attach arrives late",
        "the engine is stopped until its pool is dropped",
        "the manager is stopped for a second",
    ],
)
def test_a_fault_changes_no_token(
    services: Services, streams: Streams, draw: random.Random, expected: list[list[int]], fault: Fault
) -> None:
    fault(services, draw)
    assert streams.tokens() == expected


def test_connections_that_break_repeatedly_change_no_token(
    services: Services, draw: random.Random, expected: list[list[int]]
) -> None:
    streams = services.run(prompts(STREAMS, TOKENS, "cut"))
    for moment in sorted(draw.randrange(STREAMS * TOKENS * 2 // 3) for _ in range(4)):
        streams.wait_for_tokens(moment)
        faults.cut_the_connection(services, draw)
    assert streams.tokens() == expected


def test_blocks_of_requests_that_end_while_the_connection_breaks_are_freed(
    services: Services, expected: list[list[int]]
) -> None:
    requests = [request for salt in ("come", "go") for request in prompts(STREAMS, 6, salt)]
    tokens = faults.cut_while_requests_come_and_go(services, requests, cuts=5)
    assert tokens == [tokens[:6] for tokens in expected] * 2


def test_a_manager_whose_answers_take_50_ms_changes_no_token(
    services: Services, draw: random.Random, expected: list[list[int]]
) -> None:
    services.forwarder.delay_answers(0.05)
    faults.cut_without_a_refusal(services, draw)
    try:
        streams = services.run(prompts(STREAMS, TOKENS, "delayed"))
        assert streams.tokens() == expected
    finally:
        services.forwarder.delay_answers(0)
        faults.cut_without_a_refusal(services, draw)


@pytest.mark.parametrize("away", [Services.manager_away, Services.connection_away], ids=["killed", "cut off"])
def test_requests_cancelled_without_a_manager_hold_no_blocks_afterwards(
    services: Services, draw: random.Random, expected: list[list[int]], away: Away
) -> None:
    streams = services.run(prompts(STREAMS, TOKENS, f"cancelled, {away.__name__}", slow=True))
    streams.wait_for_starts()
    with away(services):
        assert services.engine_metric("quire_num_requests_running") == STREAMS
        cancelled = faults.cancel_some(services, streams, draw)
    ids = {streams.answers[number].started.request_id for number in cancelled}
    wait_until(lambda: not ids & services.sequences().keys(), "cancelled requests hold no blocks")
    assert streams.codes() == dict.fromkeys(cancelled, grpc.StatusCode.CANCELLED)
    for number in set(range(STREAMS)) - set(cancelled):
        assert streams.answers[number].token_ids == expected[number]
