"""Endpoints for operators and probes, and paths that are not served."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from tests.load import prompt_request
from tests.running_quire import CALL_SECONDS, RunningQuire
from tests.services.gateway.http.responses import events, rejection
from tests.services.gateway.http.scripted_server import ScriptedServer


@pytest.fixture(scope="module")
def server(tiny_model: Callable[[str], Path]) -> Iterator[ScriptedServer]:
    with closing(ScriptedServer(tiny_model("llama"))) as one:
        yield one


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_ping_is_answered_as_health(server: ScriptedServer, method: str) -> None:
    ping = server.client.request(method, "/ping")
    assert (ping.status_code, ping.json()) == (200, server.client.get("/health").json())


@pytest.mark.parametrize(
    "path", ["/ping", "/health", "/ready", "/live", "/load", "/get_load", "/server_info", "/version", "/v1/models"]
)
def test_head_is_answered_as_get_without_a_body(server: ScriptedServer, path: str) -> None:
    head, get = server.client.head(path), server.client.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == get.headers["content-length"] == str(len(get.content))


@pytest.mark.parametrize(("path", "methods"), [("/ping", "GET, HEAD, POST"), ("/health", "GET, HEAD")])
def test_a_wrong_method_is_rejected_with_all_that_the_path_has(server: ScriptedServer, path: str, methods: str) -> None:
    answer = server.client.delete(path)
    assert (*rejection(answer), answer.headers["allow"]) == (405, "method_not_allowed", methods)


def test_the_served_model_is_named_as_sglangs_server_names_it(server: ScriptedServer) -> None:
    name = server.client.get("/v1/models").json()["data"][0]["id"]
    version = server.client.get("/version").json()["version"]
    answer = server.client.get("/server_info").json()
    assert answer == {"served_model_name": name, "model_path": name, "version": version}


def test_the_load_is_the_number_of_requests_in_flight(server: ScriptedServer) -> None:
    server.call(server.handler.hold.clear)
    body = {"prompt": "x", "max_tokens": 2, "stream": True}
    try:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as response:
            chunks = events(response)
            next(chunks)
            assert server.client.get("/load").json() == {"server_load": 1}
            server.call(server.handler.hold.set)
            assert list(chunks)
    finally:
        server.call(server.handler.hold.set)
    server.settle()
    assert server.client.get("/load").json() == {"server_load": 0}


def test_the_loads_of_engines_have_the_members_of_sglangs_server(server: ScriptedServer) -> None:
    assert server.client.get("/get_load").json() == [
        {"dp_rank": 0, "num_reqs": 3, "num_waiting_reqs": 1, "num_tokens": 50},
        {"dp_rank": 1, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0},
    ]


def test_the_loads_need_a_valid_key(server: ScriptedServer) -> None:
    answer = server.client.get("/get_load", headers={"authorization": "Bearer wrong"})
    assert rejection(answer) == (401, "invalid_api_key")


def until_loaded(http: httpx.Client, holds: Callable[[dict[str, int]], bool]) -> dict[str, int]:
    """Return the load of the only engine as soon as it holds."""
    deadline, pause = time.monotonic() + CALL_SECONDS, threading.Event()
    while True:
        (load,) = http.get("/get_load").json()
        if holds(load):
            return dict(load)
        assert time.monotonic() < deadline, load
        pause.wait(0.01)


def test_an_engines_load_is_that_of_its_requests(http: httpx.Client) -> None:
    idle = {"dp_rank": 0, "num_reqs": 0, "num_waiting_reqs": 0, "num_tokens": 0}
    until_loaded(http, lambda load: load == idle)
    bodies = [{"prompt": [5 + number] * 100, "max_tokens": 60, "ignore_eos": True} for number in range(12)]
    with ThreadPoolExecutor(len(bodies)) as clients:  # more prompts than the pool has room for
        answers = [clients.submit(http.post, "/v1/completions", json=body) for body in bodies]
        load = until_loaded(http, lambda load: load["num_waiting_reqs"] > 0)
        assert [one.result().status_code for one in answers] == [200] * len(bodies)
    assert load["num_waiting_reqs"] < load["num_reqs"] <= len(bodies)
    assert load["num_tokens"] >= 100
    until_loaded(http, lambda load: load == idle)  # cached blocks do not count


def test_a_reset_makes_the_engine_forget_cached_prefixes(tiny_quire: RunningQuire, http: httpx.Client) -> None:
    def cached() -> int:
        request = prompt_request("A prefix that only this test has, in several blocks of tokens", 2)
        return tiny_quire.generate(request).finished.usage.cached_tokens

    cached()
    assert cached() > 0
    reset = http.post("/reset_prefix_cache", params={"reset_running_requests": "false"})
    assert (reset.status_code, reset.json()) == (200, {"status": "reset"})
    assert cached() == 0


@pytest.mark.parametrize(
    ("query", "refused"),
    [
        ({"model": "other"}, (404, "model_not_found", "model")),
        ({"reset_external": "true"}, (400, "unsupported_value", "reset_external")),
        ({"nonsense": "1"}, (400, "unsupported_value", "nonsense")),
    ],
)
def test_a_reset_that_is_not_served_is_rejected(
    http: httpx.Client, query: dict[str, str], refused: tuple[int, str, str]
) -> None:
    answer = http.post("/reset_prefix_cache", params=query)
    assert (*rejection(answer), answer.json()["error"]["param"]) == refused


def test_a_page_of_another_site_cannot_reset_without_a_preflight(server: ScriptedServer) -> None:
    def reset(site: str) -> httpx.Response:
        return server.client.post("/reset_prefix_cache", headers={"sec-fetch-site": site})

    assert [rejection(reset(site)) for site in ("cross-site", "same-site")] == [(403, "not_permitted")] * 2
    assert server.administration.requests == []
    assert reset("same-origin").status_code == 200
    server.administration.requests.clear()


def test_a_reset_needs_an_operators_key(server: ScriptedServer) -> None:
    for key, refused in (("wrong", (401, "invalid_api_key")), ("humble", (403, "not_permitted"))):
        answer = server.client.post("/reset_prefix_cache", headers={"authorization": f"Bearer {key}"})
        assert rejection(answer) == refused
    assert server.administration.requests == []
    answer = server.client.post("/reset_prefix_cache?model=m", headers={"authorization": "Bearer good"})
    assert answer.status_code == 200
    assert [request.model for request in server.administration.requests] == ["m"]


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/embeddings", "no embeddings"),
        ("/v1/audio/transcriptions", "no audio"),
        ("/v1/images/generations", "no images"),
        ("/v1/rerank", "no scores"),
        ("/v1/files/file-1/content", "quire run-batch"),
        ("/v1/load_lora_adapter", "no LoRA adapters"),
        ("/v1/responses/resp_1", "does not store responses"),
        ("/v1/responses/resp_1/cancel", "does not store responses"),
        ("/v1/chat/completions/chatcmpl-1", "does not store chat completions"),
        ("/metrics", "--metrics-listen"),
    ],
)
def test_a_known_path_that_is_not_served_is_named_with_the_reason(
    server: ScriptedServer, method: str, path: str, words: str
) -> None:
    answer = server.client.request(method, path, content=json.dumps({"input": "x"}) if method == "POST" else None)
    assert rejection(answer) == (404, "not_served")
    assert f"{method} {path} is not served: Quire" in (message := answer.json()["error"]["message"])
    assert words in message
