"""vllm-router and sglang-router in front of two Quire gateways, each with an engine.

They speak OpenAI's HTTP API. Both read a body into types of their own and write it again, so they add members, and drop
or refuse what they do not know.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest

from tests.acceptance.conftest import Record
from tests.acceptance.event_consumers import until
from tests.acceptance.router_environments import router_environment
from tests.acceptance.running_routers import RunningRouter, WorkerCalls, running_router
from tests.running_quire import RunningQuire, start_quires
from tests.scrape import Scrape

HTTP = ("--model", "demo", "--http-listen", "127.0.0.1:0")
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8, "temperature": 0}
TEXT: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ROUTERS = {
    "vllm-router": ("round_robin", "cache_aware", "consistent_hash", "power_of_two"),
    "sglang-router": ("round_robin", "cache_aware", "manual", "power_of_two"),
}
# What the routers ask workers for beside answers, with our statuses. A router does without what is 404.
PROBES = {
    "vllm-router": {("GET", "/health", 200), ("GET", "/v1/models", 200), ("GET", "/get_load", 200)},
    "sglang-router": {
        ("GET", "/health", 200),
        ("GET", "/server_info", 200),
        ("GET", "/model_info", 404),
        ("GET", "/get_model_info", 404),
        ("GET", "/get_load", 200),
    },
}

each_router = pytest.mark.parametrize("name", ROUTERS)
each_policy = pytest.mark.parametrize(
    ("name", "policy"), [(name, policy) for name, policies in ROUTERS.items() for policy in policies]
)


@pytest.fixture(scope="module")
def quires() -> Iterator[list[RunningQuire]]:
    running = start_quires(HTTP, HTTP)
    yield running
    for one in running:
        assert one.settled_pool().sequences == 0
        assert one.close() == 0


def urls(quires: list[RunningQuire]) -> list[str]:
    return [one.http_url for one in quires]


def posted(url: str, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    return httpx.post(url + path, json={"model": "demo", **body}, headers=headers, timeout=60)


def choices(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def events(answer: httpx.Response) -> list[str]:
    """Return the events of a stream without ids and times."""
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    return [line if line == "[DONE]" else repr(httpx.Response(200, text=line).json()["choices"]) for line in lines]


def answered(quire: RunningQuire) -> float:
    """Return how many requests a gateway has finished."""
    return sum(
        Scrape.of(quire.metrics_urls["gateway"]).values("quire_request_success_total", "finished_reason").values()
    )


@each_policy
def test_answers_are_those_of_the_gateways(quires: list[RunningQuire], name: str, policy: str, record: Record) -> None:
    record(versions=router_environment(name).versions())
    direct = quires[0].http_url
    with running_router(name, urls(quires), "--policy", policy) as router:
        for path, body in ((CHATS, CHAT), (COMPLETIONS, TEXT), (CHATS, CHAT | {"tools": [TOOL]})):
            expected = choices(posted(direct, path, body))
            for _ in range(2):
                assert choices(posted(router.url, path, body)) == expected
            streamed = body | {"stream": True}
            assert events(posted(router.url, path, streamed)) == events(posted(direct, path, streamed))
        assert httpx.get(f"{router.url}/health").status_code == 200


@each_router
def test_round_robin_uses_both_gateways(quires: list[RunningQuire], name: str) -> None:
    before = [answered(one) for one in quires]
    with running_router(name, urls(quires), "--policy", "round_robin") as router:
        for _ in range(4):
            choices(posted(router.url, COMPLETIONS, TEXT))
    assert [answered(one) - count for one, count in zip(quires, before, strict=True)] == [2, 2]


@each_router
def test_a_cache_aware_router_sends_a_conversation_to_one_gateway(quires: list[RunningQuire], name: str) -> None:
    before = [answered(one) for one in quires]
    prompt = "In a hole in the ground there lived a hobbit. " * 12
    with running_router(name, urls(quires), "--policy", "cache_aware") as router:
        for turn in range(4):
            choices(posted(router.url, COMPLETIONS, TEXT | {"prompt": prompt + "It was a good hole. " * turn}))
    assert sorted(answered(one) - count for one, count in zip(quires, before, strict=True)) == [0, 4]


@each_router
def test_refusals_of_the_gateway_are_passed_through(quires: list[RunningQuire], name: str) -> None:
    refused = (
        (404, {"model": "nobody"}, "model"),
        (400, {"prompt": "word " * 9000}, "prompt"),
        (400, {"max_tokens": 4, "n": 3, "best_of": 2}, "best_of"),
        (400, {"no_stop_trim": True}, "no_stop_trim"),
    )
    with running_router(name, urls(quires), "--policy", "round_robin") as router:
        for status, body, param in refused:
            direct, routed = (posted(url, COMPLETIONS, TEXT | body) for url in (quires[0].http_url, router.url))
            assert (routed.status_code, routed.json()["error"]["param"]) == (status, param)
            assert routed.json() == direct.json()


def test_vllms_router_passes_on_what_it_does_not_know(quires: list[RunningQuire]) -> None:
    with running_router("vllm-router", urls(quires), "--policy", "round_robin") as router:
        answer = posted(router.url, CHATS, CHAT | {"of_tomorrow": 1})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "of_tomorrow"
        assert choices(posted(router.url, COMPLETIONS, TEXT | {"prompt": [1, 2, 3]}))
        assert posted(router.url, "/tokenize", {"prompt": "hello"}).json()["count"] == 1
        assert httpx.get(f"{router.url}/v1/models").json()["data"][0]["id"] == "demo"


def test_sglangs_router_refuses_token_ids_and_drops_what_it_does_not_know(quires: list[RunningQuire]) -> None:
    with running_router("sglang-router", urls(quires), "--policy", "round_robin") as router:
        assert choices(posted(router.url, CHATS, CHAT | {"of_tomorrow": 1}))
        assert httpx.get(f"{router.url}/v1/models").json()["data"][0]["id"] == "demo"
        assert posted(router.url, COMPLETIONS, TEXT | {"prompt": [1, 2, 3]}).status_code == 422
        assert posted(router.url, "/tokenize", {"prompt": "hello"}).status_code == 404


@each_router
def test_the_calls_to_a_worker_are_known_and_answered(quires: list[RunningQuire], name: str) -> None:
    calls = WorkerCalls(quires[0].http_url)
    with running_router(name, [calls.url], "--policy", "round_robin") as router:
        httpx.get(f"{router.url}/v1/models")
        httpx.get(f"{router.url}/get_loads")
        choices(posted(router.url, CHATS, CHAT))
    calls.close()
    assert calls.counts.keys() - {("POST", CHATS, 200)} == PROBES[name]


def test_vllms_cache_aware_router_gets_rendered_prompts(quires: list[RunningQuire]) -> None:
    calls = [WorkerCalls(one.http_url) for one in quires]
    with running_router("vllm-router", [one.url for one in calls], "--policy", "cache_aware") as router:
        choices(posted(router.url, COMPLETIONS, TEXT))
    for one in calls:
        one.close()
    counts = calls[0].counts + calls[1].counts
    assert {status for method, path, status in counts if path == f"{COMPLETIONS}/render"} == {200}
    assert counts["POST", COMPLETIONS, 200] == 1


@each_router
def test_the_router_goes_on_without_a_killed_gateway(name: str) -> None:
    quires = start_quires(HTTP, HTTP)
    with running_router(name, urls(quires), "--policy", "round_robin") as router:
        expected = choices(posted(router.url, COMPLETIONS, TEXT))
        quires[0].process.kill()
        quires[0].ended()
        for _ in range(4):
            assert choices(posted(router.url, COMPLETIONS, TEXT)) == expected
        until(lambda: router.healthy() == 1, "one worker is left")
    assert quires[1].close() == 0


def test_sessions_stay_with_their_gateway(quires: list[RunningQuire]) -> None:
    counts = {}
    with running_router("vllm-router", urls(quires), "--policy", "consistent_hash") as router:
        for session in ("one", "two", "three"):
            before = [answered(one) for one in quires]
            for _ in range(3):
                choices(posted(router.url, COMPLETIONS, TEXT, **{"x-session-id": session}))
            counts[session] = sorted(answered(one) - count for one, count in zip(quires, before, strict=True))
    assert all(one == [0, 3] for one in counts.values()), counts


def is_idle(quire: RunningQuire) -> bool:
    return bool(httpx.get(f"{quire.http_url}/get_load").json()[0]["num_tokens"] == 0)


# vllm-router wants `{"load": N}`, and not a list, from the path at which sglang-router wants a list.
@pytest.mark.parametrize(("name", "idle"), [("vllm-router", -1), ("sglang-router", 0)])
def test_a_router_that_is_asked_for_its_load_shows_both_gateways(
    quires: list[RunningQuire], name: str, idle: int
) -> None:
    for one in quires:
        until(partial(is_idle, one), "the gateway's engine is idle")
    with running_router(name, urls(quires), "--policy", "power_of_two") as router:
        loads = httpx.get(f"{router.url}/get_loads").json()["workers"]
    assert {one["worker"]: one["load"] for one in loads} == dict.fromkeys(urls(quires), idle)


def test_sglangs_router_reads_the_tokens_of_a_loaded_gateway(quires: list[RunningQuire]) -> None:
    loaded, _ = urls(quires)
    body = {"model": "demo", "prompt": [5] * 100, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with running_router("sglang-router", urls(quires), "--policy", "power_of_two") as router:

        def is_read() -> bool:
            loads = httpx.get(f"{router.url}/get_loads").json()["workers"]
            return all((one["load"] >= 100) == (one["worker"] == loaded) for one in loads)

        with httpx.stream("POST", loaded + COMPLETIONS, json=body, timeout=60) as response:
            assert response.status_code == 200
            until(is_read, "the router reads a load of the first gateway")


def test_the_routers_close(quires: list[RunningQuire]) -> None:
    router = RunningRouter("vllm-router", urls(quires))
    router.close()
    assert router.process.poll() is not None
