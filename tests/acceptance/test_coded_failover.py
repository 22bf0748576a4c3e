"""Engines with a KV cache in 8 bits are killed and restarted under streams, which continue with the same tokens."""

import random
from collections.abc import Iterator

import pytest

from tests.acceptance.conftest import Record
from tests.faults import Processes
from tests.running.failover import Failing, check_equal, failovers, kill, streams

ROUNDS = 5
STREAMS = 8
TOKENS = 40
MAX_SECONDS = 300
OPTIONS = ("--device-blocks", "1024", "--kv-dtype", "int8", "--dtype", "bfloat16", "--weights", "bf16")


@pytest.fixture
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Failing]:
    processes = Processes()
    services = Failing(tmp_path_factory.mktemp("sockets"), "demo", keep=processes.keep, engine_options=OPTIONS)
    yield services
    assert services.close() == [0, 0]
    assert processes.end() == []


def test_streams_continue_on_a_restarted_engine_with_equal_tokens(services: Failing, record: Record) -> None:
    undisturbed = services.run(streams(STREAMS, TOKENS, "undisturbed"), MAX_SECONDS)
    assert undisturbed.codes() == {}
    failed_over = 0
    for number in range(ROUNDS):
        services.mend()
        draw = random.Random(number)
        running = services.run(streams(STREAMS, TOKENS, f"round {number}"), MAX_SECONDS)
        running.wait_for_tokens(draw.randrange(STREAMS * TOKENS * 2 // 3))
        kill(services, draw)
        assert running.codes() == {}
        check_equal(running.answers, undisturbed.answers)
        services.check_that_nothing_is_left()
        failed_over += failovers(running.answers)
    assert failed_over > ROUNDS
    record(rounds=ROUNDS, streams=ROUNDS * STREAMS, streams_that_failed_over=failed_over)
