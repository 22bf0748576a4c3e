"""Many concurrent and disconnected clients: no blocks are held for them afterwards."""

from collections.abc import Iterator

import pytest

from quire.v1 import gateway_pb2
from tests.load import (
    cancel_at_random,
    kill_a_client_mid_stream,
    let_deadlines_pass,
    prompt_request,
    run_streams,
    slow_request,
)
from tests.running_quire import RunningQuire
from tests.scrape import Scrape

# One request fills the pool.
LONG = 900
PROMPTS = [
    "The quick brown fox jumps over the lazy dog, again and again.",
    "Blocks of keys and values are kept like pages of memory.",
    "Größe, naïve, 北京, 東京, 🙂🚀, Ελληνικά, кириллица",
]


@pytest.fixture(autouse=True)
def _nothing_is_held_afterwards(tiny_quire: RunningQuire) -> Iterator[None]:
    yield
    pool = tiny_quire.settled_pool()
    assert (pool.sequences, pool.groups, pool.device.held, pool.computed_tokens) == (0, 0, 0, 0)
    assert pool.device.free + pool.device.cached == pool.device_blocks
    assert len(tiny_quire.generate(prompt_request("And now?", 3)).token_ids) == 3


def mixed_requests(count: int) -> list[gateway_pb2.GenerateRequest]:
    """Make requests of different lengths, half of them sampled, with shared prefixes."""
    return [
        prompt_request(
            f"{PROMPTS[number % 3]} {PROMPTS[number // 3 % 3]} {number}",
            max_tokens=70 + number,
            seed=number if number % 2 else None,
        )
        for number in range(count)
    ]


def long_request(number: int) -> gateway_pb2.GenerateRequest:
    return slow_request(f"{PROMPTS[number % 3]} {number}", max_tokens=LONG)


def generated(quire: RunningQuire) -> float:
    """Return the count of generated tokens of an idle engine."""
    quire.settled_pool()
    return Scrape.of(quire.metrics_urls["engine"]).value("quire_generation_tokens_total")


def test_64_streams_at_once_get_the_same_tokens_as_each_alone(tiny_quire: RunningQuire) -> None:
    requests = mixed_requests(16)
    preempted = tiny_quire.pool().totals.preemptions
    slow = slow_request("While it runs, the others fill the pool", 80)
    _, *together = run_streams(tiny_quire, [slow, *requests * 4], concurrency=65)
    assert tiny_quire.pool().totals.preemptions > preempted, "the pool was never short"
    assert tiny_quire.pool().totals.peak_saved_blocks > 0
    alone = run_streams(tiny_quire, requests, concurrency=1)
    assert [(one.token_ids, one.text) for one in together] == [(one.token_ids, one.text) for one in alone] * 4
    assert [len(answer.token_ids) for answer in alone] == [request.stopping.max_tokens for request in requests]


def test_requests_cancelled_at_random_moments_hold_no_blocks(tiny_quire: RunningQuire) -> None:
    before = generated(tiny_quire)
    moments = cancel_at_random(tiny_quire, long_request, count=60, seed=1)
    assert moments[0] > 0, "some were cancelled before they began"
    assert len(moments) > 4
    assert generated(tiny_quire) - before < 60 * LONG / 3, "the engine continued without the clients"


def test_requests_with_exceeded_deadlines_hold_no_blocks(tiny_quire: RunningQuire) -> None:
    before = generated(tiny_quire)
    let_deadlines_pass(tiny_quire, long_request, count=20, seed=2)
    assert generated(tiny_quire) - before < 20 * LONG / 3, "the engine continued after the deadlines"


def test_a_killed_client_holds_no_blocks(tiny_quire: RunningQuire) -> None:
    before = generated(tiny_quire)
    kill_a_client_mid_stream(tiny_quire, slow_request("My client dies.", LONG))
    assert generated(tiny_quire) - before < LONG / 2
