"""What happens between engine and KV manager, and to either of them, while streams run: the streams do not notice."""

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import grpc
import pytest

from quire.v1 import gateway_pb2
from tests import faults
from tests.faults import Away, Fault, Processes, Services, Streams, prompt, prompts, wait_until

STREAMS = 32
TOKENS = 120
# Where the twins' order is looked at: small enough that cached blocks are evicted.
FEW_BLOCKS = 80
# Times that streams are begun anew because they were over too early.
ATTEMPTS = 10


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
    """The tokens of all streams when nothing happens."""
    tokens = all_services.run(prompts(STREAMS, TOKENS, "undisturbed")).tokens()
    wait_until(lambda: all_services.pool().sequences == 0, "it is over")
    return tokens


@pytest.fixture
def services(all_services: Services, expected: list[list[int]]) -> Iterator[Services]:
    """The services, with nothing left in the pool after the test."""
    yield all_services
    all_services.check_that_nothing_is_left()


@pytest.fixture
def draw(request: pytest.FixtureRequest) -> random.Random:
    """Random numbers, other ones for each test."""
    return random.Random(request.node.name)


@pytest.fixture
def streams(services: Services, draw: random.Random, request: pytest.FixtureRequest) -> Streams:
    """All streams, at a random moment before their last third."""
    streams = services.run(prompts(STREAMS, TOKENS, request.node.name))
    streams.wait_for_tokens(draw.randrange(STREAMS * TOKENS * 2 // 3))
    return streams


@contextmanager
def away_from_streams(
    services: Services, away: Away, draw: random.Random, salt: str, least: int
) -> Iterator[tuple[Streams, list[gateway_pb2.GenerateRequest]]]:
    """Have the manager away while at least so many streams run; where more were over before that, others follow."""
    for attempt in range(ATTEMPTS):
        requests = prompts(STREAMS, TOKENS, f"{salt} {attempt}")
        streams = services.run(requests)
        streams.wait_for_tokens(draw.randrange(STREAMS * TOKENS * 2 // 3))
        if least == STREAMS:
            streams.wait_for_starts()
        with away(services):
            if services.engine_metric("quire_num_requests_running") >= least:
                yield streams, requests
                return
        streams.wait_for_ends()
    raise AssertionError("streams are over before the manager is away")


# The KV manager dies


def test_a_killed_manager_changes_no_token_and_no_cached_prefix(
    services: Services, draw: random.Random, expected: list[list[int]]
) -> None:
    old = prompt(1000, 200, 8, "killed")
    services.generate(old)
    wait_until(lambda: services.pool().sequences == 0, "it is over")
    with away_from_streams(services, Services.manager_away, draw, "killed", least=1) as (streams, requests):
        pass
    assert streams.tokens() == expected
    assert services.generate(old).started.cached_tokens == 192
    again = services.run(requests)
    assert again.tokens() == expected
    assert [answer.started.cached_tokens for answer in again.answers] == [
        (answer.started.prompt_tokens - 1) // 16 * 16 for answer in streams.answers
    ]


def test_a_manager_killed_while_nothing_runs_shows_the_same_blocks_afterwards(services: Services) -> None:
    before, counts = services.block_map(), services.pool().device
    with services.manager_away():
        pass
    assert services.block_map() == before
    assert services.pool().device == counts


@pytest.fixture(scope="module")
def twins(
    tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, processes: Processes
) -> Iterator[list[Services]]:
    """Two of everything, with small pools in which the same has happened."""
    folders = [tmp_path_factory.mktemp("sockets") for _ in range(2)]
    start = partial(Services, model=str(tiny_model("llama")), device_blocks=FEW_BLOCKS, keep=processes.keep)
    with ThreadPoolExecutor() as starters:
        both = list(starters.map(start, folders))
    yield both
    assert [services.close() for services in both] == [[0, 0, 0]] * 2


def test_the_order_of_free_blocks_is_that_of_a_twin_that_nothing_happened_to(twins: list[Services]) -> None:
    def kill(services: Services) -> None:
        faults.kill_the_manager(services, random.Random(1))

    def cut(services: Services) -> None:
        faults.cut_the_connection(services, random.Random(1))

    undisturbed, disturbed = twins
    for salt, disturb in (("kill", kill), ("cut", cut)):
        order = faults.order_after(undisturbed, lambda _: None, salt)
        assert faults.order_after(disturbed, disturb, salt) == order
    for services in twins:
        services.check_that_nothing_is_left()


# Something happens under streams


@pytest.mark.parametrize(
    "fault",
    [faults.deliver_late, faults.attach_late, faults.stop_the_engine, partial(faults.stop_the_manager, seconds=3)],
    ids=[
        "a Step of the old session comes late",
        "an attempt to attach comes late",
        "the engine stands still until its pool is gone",
        "the manager stands still for three seconds",
    ],
)
def test_streams_do_not_notice(
    services: Services, streams: Streams, draw: random.Random, expected: list[list[int]], fault: Fault
) -> None:
    fault(services, draw)
    assert streams.tokens() == expected


def test_streams_do_not_notice_connections_that_break_again_and_again(
    services: Services, draw: random.Random, expected: list[list[int]]
) -> None:
    streams = services.run(prompts(STREAMS, TOKENS, "cut"))
    for moment in sorted(draw.randrange(STREAMS * TOKENS * 2 // 3) for _ in range(4)):
        streams.wait_for_tokens(moment)
        faults.cut_the_connection(services, draw)
    assert streams.tokens() == expected


def test_what_ends_while_the_connection_breaks_is_given_back(services: Services, expected: list[list[int]]) -> None:
    requests = [request for salt in ("come", "go") for request in prompts(STREAMS, 6, salt)]
    tokens = faults.cut_while_requests_come_and_go(services, requests, cuts=5)
    assert tokens == [tokens[:6] for tokens in expected] * 2


def test_streams_do_not_notice_a_manager_whose_answers_take_50_ms(
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
def test_what_is_cancelled_while_the_manager_is_away_is_not_in_the_pool_afterwards(
    services: Services,
    draw: random.Random,
    expected: list[list[int]],
    away: Away,
) -> None:
    with away_from_streams(services, away, draw, f"cancelled, {away.__name__}", STREAMS) as (streams, _):
        cancelled = faults.cancel_some(services, streams, draw)
    ids = {streams.answers[number].started.request_id for number in cancelled}
    wait_until(lambda: not ids & services.sequences().keys(), "what was cancelled holds no blocks")
    assert streams.codes() == dict.fromkeys(cancelled, grpc.StatusCode.CANCELLED)
    for number in set(range(STREAMS)) - set(cancelled):
        assert streams.answers[number].token_ids == expected[number]


# An engine dies


def test_a_killed_engines_pool_is_gone_within_the_lease_and_another_engine_is_untouched(
    services: Services, draw: random.Random, expected: list[list[int]]
) -> None:
    before = services.pool()
    streams: list[Streams] = []

    def run_beside(services: Services) -> None:
        streams.append(services.run(prompts(STREAMS, TOKENS, "beside")))
        streams[0].wait_for_starts()

    faults.kill_another_engine(services, draw, just_before=run_beside)
    assert streams[0].tokens() == expected
    wait_until(lambda: services.pool().sequences == 0, "it is over")
    after = services.pool()
    assert (after.session, after.incarnation) == (before.session, before.incarnation)
    assert after.totals.prefix_query_tokens - before.totals.prefix_query_tokens == sum(
        answer.started.prompt_tokens for answer in streams[0].answers
    )
