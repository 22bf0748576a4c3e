"""The profile smg: that router in front of two engines, which it sees with their caches."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.deployment.compose.stack import BUILD_SECONDS, Stack, inspect
from tests.faults import wait_until
from tests.running_quire import CALL_SECONDS
from tests.scrape import Scrape

SMG_PORT = "30000/tcp"
QUESTIONS = ("What is a keel?", "What is a rudder?", "What is a mast?", "What is a sail?")
SAILORS = "Sailor number {} tells of the sea, of the ship and of the harbour. "

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    two = Stack(
        tmp_path_factory.mktemp("stack"),
        QUIRE_ENGINES="2",
        QUIRE_ENGINE_SMG="true",
        QUIRE_ENGINE_KV_EVENTS_INSECURE="true",
        COMPOSE_PROFILES="cpu,smg",
    )
    two.succeed("build", "smg", seconds=BUILD_SECONDS)
    two.up()
    two.succeed("up", "--detach", "--no-build", "smg")
    two.wait_until_healthy("smg")
    yield two
    two.down()


@pytest.fixture(scope="module")
def url(stack: Stack) -> str:
    (bound,) = inspect(stack.container("smg"))["NetworkSettings"]["Ports"][SMG_PORT]
    return f"http://{bound['HostIp']}:{bound['HostPort']}"


def ask(url: str, text: str) -> Any:
    body = {"model": "demo", "messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=CALL_SECONDS)
    assert answer.status_code == 200, answer.text
    return answer.json()


def subscribers(stack: Stack) -> list[float]:
    """Return how many streams of events each engine has."""
    pages = [Scrape.of(f"http://{one}/metrics") for one in stack.metrics_addresses("engine")]
    return [page.value("quire_smg_subscribers") for page in pages]


def hits(stack: Stack) -> float:
    """Return how many prompt tokens were in the cache of the engine that got them."""
    (manager,) = stack.metrics_addresses("kvmanager")
    return sum(Scrape.of(f"http://{manager}/metrics").values("quire_prefix_cache_hits_total", "engine").values())


def test_smg_answers_from_the_engines_as_often_as_asked(stack: Stack, url: str) -> None:
    answers = [ask(url, QUESTIONS[0]) for _ in range(2)]
    assert answers[0]["choices"][0]["message"]["content"] == answers[1]["choices"][0]["message"]["content"] != ""
    assert answers[0]["usage"]["completion_tokens"] == 8


def test_smg_follows_the_cache_of_each_engine(stack: Stack) -> None:
    wait_until(lambda: subscribers(stack) == [1.0, 1.0], "smg follows both engines")


def test_smg_sends_a_prompt_to_the_engine_that_has_its_prefix(stack: Stack, url: str) -> None:
    sailors = [SAILORS.format(number) * 20 for number in range(4)]
    for sailor in sailors:
        ask(url, sailor + QUESTIONS[0])
    before = hits(stack)
    prompts = sum(ask(url, sailor + question)["usage"]["prompt_tokens"] for sailor in sailors for question in QUESTIONS)
    assert hits(stack) - before > 0.8 * prompts


def test_smg_is_published_on_this_machine_alone(stack: Stack) -> None:
    (bound,) = inspect(stack.container("smg"))["NetworkSettings"]["Ports"][SMG_PORT]
    assert bound["HostIp"] == "127.0.0.1"
