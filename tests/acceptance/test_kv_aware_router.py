"""vllm-router with the policy kv_aware, which reads the KV events of the engines behind two gateways.

It knows what it has not routed itself: prompts that went to a gateway directly, before it joined too. It fills gaps
through the replay socket, but keeps only answers whose numbers follow each other up to the live batch. So the engines'
numbers begin at 0, and their snapshots have all numbers.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import httpx
import pytest

from bench.loads.http_server import free_address
from tests.acceptance.event_consumers import plain, until
from tests.acceptance.running_routers import RunningRouter, running_router
from tests.running_quire import RunningQuire, start_quires
from tests.scrape import Scrape

BLOCK_SIZE = 16
HISTORY = 64
PROMPTS = [list(range(1000 * number, 1000 * number + 10 * BLOCK_SIZE)) for number in range(1, 7)]


class EventQuire:
    """A `quire serve` whose engine publishes KV events."""

    def __init__(self, quire: RunningQuire, events: str, replay: str) -> None:
        self.quire, self.url = quire, quire.http_url
        self.options = (
            *("--kv-event-source", f"{self.url}=tcp://{events}"),
            *("--kv-event-replay-source", f"{self.url}=tcp://{replay}"),
        )

    def complete(self, prompt: list[int]) -> None:
        completed(self.url, prompt)

    def finished(self) -> float:
        shown = Scrape.of(self.quire.metrics_urls["gateway"])
        return sum(shown.values("quire_request_success_total", "finished_reason").values())

    def batches(self) -> float:
        return sum(self._engine().values("quire_kv_events_batches_total", "engine").values())

    def snapshots(self) -> float:
        return self._engine().values("quire_kv_events_replay_requests_total", "outcome")["snapshot"]

    def _engine(self) -> Scrape:
        return Scrape.of(self.quire.metrics_urls["engine"])


def completed(url: str, prompt: list[int]) -> Any:
    body = {"model": "demo", "prompt": prompt, "max_tokens": 2, "temperature": 0}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status().json()


@pytest.fixture
def pair() -> Iterator[list[EventQuire]]:
    addresses = [(free_address(), free_address()) for _ in range(2)]
    common = (
        *("--model", "demo", "--http-listen", "127.0.0.1:0", "--heartbeat-seconds", "0.1"),
        *("--kv-events-numbers", "zero", "--kv-events-history", str(HISTORY)),
    )
    listening = [("--kv-events-listen", one, "--kv-events-replay-listen", other) for one, other in addresses]
    quires = start_quires(*((*common, *one) for one in listening))
    yield [EventQuire(quire, *own) for quire, own in zip(quires, addresses, strict=True)]
    for one in quires:
        assert one.close() == 0


def routed_to(router: RunningRouter, pair: list[EventQuire], prompt: list[int]) -> int:
    """Return the number of the gateway that the router sends a prompt to."""
    before = [one.finished() for one in pair]
    completed(router.url, prompt)
    (number,) = (place for place, one in enumerate(pair) if one.finished() > before[place])
    return number


def applied(router: RunningRouter, one: EventQuire) -> int:
    """Return how many batches of an engine's events the router has applied."""
    return sum(f"live sequence advanced source={one.url}" in plain(line) for line in router.output.lines)


def until_applied(router: RunningRouter, one: EventQuire, count: int) -> None:
    until(lambda: applied(router, one) > count, f"more than {count} batches of {one.url}")


@contextmanager
def kv_aware(pair: list[EventQuire]) -> Iterator[RunningRouter]:
    """Start the router, and wait until it has applied a batch of each engine."""
    options = ("--policy", "kv_aware", "--kv-event-model", "demo", "--kv-event-block-size", str(BLOCK_SIZE))
    sources = [option for one in pair for option in one.options]
    workers = [one.url for one in pair]
    with running_router("vllm-router", workers, *options, *sources, "--log-level", "debug") as router:
        for one in pair:
            until_applied(router, one, 0)
        yield router


def test_the_router_knows_what_went_to_an_engine_directly(pair: list[EventQuire]) -> None:
    with kv_aware(pair) as router:
        for number, prompt in enumerate(PROMPTS):
            one = pair[number % 2]
            before = applied(router, one)
            one.complete(prompt)
            until_applied(router, one, before + 1)  # a heartbeat may be the first
            assert routed_to(router, pair, prompt) == number % 2


def test_the_router_knows_what_an_engine_had_before_it_joined(pair: list[EventQuire]) -> None:
    for number, prompt in enumerate(PROMPTS):
        pair[number % 2].complete(prompt)
    for one in pair:
        until(lambda: one.batches() > 2 * HISTORY, "the prompts have left the history")  # noqa: B023
    with kv_aware(pair) as router:
        for one in pair:
            assert one.snapshots() == 1
        assert [routed_to(router, pair, prompt) for prompt in PROMPTS] == [0, 1] * 3


TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
CHATS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": f"Tell me all about {topic}. " * 20}], **more}
    for topic, more in (
        ("whales", {}),
        ("clocks", {"stream": True}),
        ("rivers", {"tools": [TOOL]}),
        ("trains", {"chat_template_kwargs": {"unknown": 1}}),
    )
]


def answered(url: str, chat: dict[str, Any]) -> None:
    body = {"model": "demo", "max_tokens": 2, "temperature": 0, **chat}
    httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status()


def credited(router: RunningRouter) -> list[int]:
    """Return how many tokens of a prefix the router has found at the engine that it chose, for each request."""
    lines = [plain(line) for line in router.output.lines]
    return [int(found[1]) for line in lines if (found := re.search(r"credited_prefix_tokens=(\d+)", line))]


def has_credited(router: RunningRouter, count: int) -> bool:
    return len(credited(router)) >= count


def test_chats_are_routed_by_the_tokens_that_the_gateways_render(pair: list[EventQuire]) -> None:
    with kv_aware(pair) as router:
        for number, chat in enumerate(CHATS):
            one, other = pair[number % 2], pair[1 - number % 2]
            before = applied(router, one)
            answered(one.url, chat)
            until_applied(router, one, before + 1)  # a heartbeat may be the first
            finished = other.finished()
            answered(router.url, chat)
            assert other.finished() == finished
            until(partial(has_credited, router, number + 1), "the router has logged its choice")
        assert min(credited(router)) >= 3 * BLOCK_SIZE
