"""The chat page's routes: its files, and the blocks of one running request, from a real gateway and KV manager."""

import json
import re
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest

from services.gateway.access.api_keys import make_key
from services.runtime.logs.records import message_of
from tests.api_keys import write_keys
from tests.faults import wait_until
from tests.load import SLOW_SEED
from tests.running_quire import CALL_SECONDS, RunningQuire, RunningService
from tests.services.gateway.http.responses import rejection

A, B = make_key(), make_key()
GATEWAY = ("gateway", "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--pages", "chat")
# Of SLOW_SEED, so that the request runs as long as a test looks at it.
SLOW_CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Pages of memory, again and again and again"}],
    "max_tokens": 300,
    "ignore_eos": True,
    "stream": True,
    "seed": SLOW_SEED,
}


def new_id() -> str:
    return secrets.token_hex(16)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


@contextmanager
def running_chat(client: httpx.Client, request_id: str, key: str = "", **fields: Any) -> Iterator[Iterator[str]]:
    """A chat that runs inside: it has sent its first event. Yields the lines of the others."""
    body = {**SLOW_CHAT, "request_id": request_id, **fields}
    with client.stream("POST", "/v1/chat/completions", json=body, headers=bearer(key)) as response:
        assert response.status_code == 200, response.read()
        lines = response.iter_lines()
        next(line for line in lines if line)
        yield lines


@contextmanager
def watch(client: httpx.Client, request_id: str, key: str = "") -> Iterator[Iterator[tuple[str, dict[str, Any]]]]:
    with client.stream("GET", f"/chat/blocks/{request_id}", headers=bearer(key)) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["cache-control"] == "no-store"
        events = events_of(response)  # held here: the response is closed with it
        yield events


def events_of(response: httpx.Response) -> Iterator[tuple[str, dict[str, Any]]]:
    kind = ""
    for line in response.iter_lines():
        if line.startswith("event: "):
            kind = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield kind, json.loads(line.removeprefix("data: "))


def test_the_files_of_the_page_have_a_strict_policy_and_need_no_other_server(http: httpx.Client) -> None:
    page = http.get("/chat/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    names = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(names) > 3
    for name in ("", *names):
        answer = http.get(f"/chat/{name}")
        assert answer.status_code == 200, name
        policy = dict(one.split(" ", 1) for one in answer.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert {policy[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}
        assert policy["require-trusted-types-for"] == "'script'"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cross-origin-resource-policy"] == "same-origin"
        again = http.get(f"/chat/{name}", headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
    moved = http.get("/chat")
    assert (moved.status_code, moved.headers["location"]) == (307, "chat/")
    assert http.head("/chat/").status_code == 200


def test_a_watch_shows_the_block_table_as_it_grows_until_the_request_ends(
    http: httpx.Client, tiny_quire: RunningQuire
) -> None:
    name = new_id()
    with ThreadPoolExecutor(1) as later, watch_of_request_to_come(http, name, later) as events:
        found = [state for kind, state in events if kind == "blocks"]
    assert {(one["block_size"], one["device_blocks"], one["sequence_count"]) for one in found} == {(16, 64, 1)}
    tables = [one["sequences"][0] for one in found]
    assert len(tables) > 2
    for one in tables:
        assert len(one["table"]) == len(one["counts"]) == one["blocks"]
        assert (one["first"], one["tier"]) == (0, "device")
        assert one["tokens"] <= one["room"] <= one["blocks"] * 16
        assert one["committed"] <= one["tokens"] // 16
    assert [one["blocks"] for one in tables] == sorted(one["blocks"] for one in tables)
    assert tables[-1]["blocks"] > tables[0]["blocks"]
    assert tables[-1]["table"][: tables[0]["blocks"]] == tables[0]["table"], "a block table only grows"


@contextmanager
def watch_of_request_to_come(
    client: httpx.Client, request_id: str, later: ThreadPoolExecutor
) -> Iterator[Iterator[tuple[str, dict[str, Any]]]]:
    """Watch a request that is sent after the watch was opened; the last event must be the end."""

    def follow() -> list[tuple[str, dict[str, Any]]]:
        with watch(client, request_id) as events:
            return list(events)

    seen = later.submit(follow)
    with running_chat(client, request_id) as lines:
        list(lines)
    events = seen.result(CALL_SECONDS)
    assert events[-1] == ("ended", {})
    yield iter(events)


def test_a_client_that_leaves_gives_its_watch_back(http: httpx.Client) -> None:
    name = new_id()
    with running_chat(http, name):
        for _ in range(10):  # more than may be open together
            wait_until(lambda: opens(http, name), "the watch before has ended")


def opens(client: httpx.Client, name: str) -> bool:
    with client.stream("GET", f"/chat/blocks/{name}") as response:
        return response.status_code == 200 and next(events_of(response))[0] == "blocks"


@pytest.mark.parametrize("name", ["x", "0" * 31, "0" * 33, "G" * 32, "0" * 31 + "/", "A" * 32])
def test_an_id_that_can_be_guessed_is_refused_by_name(http: httpx.Client, name: str) -> None:
    answer = http.get(f"/chat/blocks/{name}")
    if answer.status_code != 404:  # of another path
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "request_id"
        assert "32 hexadecimal digits" in answer.json()["error"]["message"]
    else:
        assert "/" in name


def test_a_second_watch_of_a_request_and_one_too_many_are_refused(http: httpx.Client) -> None:
    names = [new_id() for _ in range(9)]
    with ExitStack() as open_now:
        for name in names:
            open_now.enter_context(running_chat(http, name))
        for name in names[:8]:
            assert next(open_now.enter_context(watch(http, name)))[0] in ("blocks", "waiting")
        assert rejection(http.get(f"/chat/blocks/{names[0]}")) == (409, "request_is_watched")
        refused = http.get(f"/chat/blocks/{names[8]}")
        assert rejection(refused) == (429, "overloaded")
        assert refused.json()["error"]["message"] == "8 requests are watched, which is the maximum of a tenant"


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_pages_of_other_sites_read_nothing(http: httpx.Client, site: str) -> None:
    for path in ("models", f"blocks/{new_id()}"):
        answer = http.get(f"/chat/{path}", headers={"sec-fetch-site": site, "origin": "https://evil.example"})
        assert rejection(answer) == (403, "not_permitted")
        assert "access-control-allow-origin" not in answer.headers


def test_a_foreign_name_of_this_machine_is_refused(http: httpx.Client) -> None:
    for path in ("", "chat.js", "models", f"blocks/{new_id()}"):
        answer = http.get(f"/chat/{path}", headers={"host": "rebound.example"})
        assert rejection(answer) == (421, "unknown_host"), path
    assert http.get("/chat/", headers={"host": "localhost:1"}).status_code == 200


def test_the_page_learns_the_sizes_of_the_pool(http: httpx.Client) -> None:
    (model,) = http.get("/chat/models").json()["models"]
    assert (model["block_size"], model["device_blocks"]) == (16, 64)


@pytest.fixture(scope="module")
def keyed(
    tiny_quire: RunningQuire, service: Callable[..., RunningService], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[httpx.Client]:
    """A gateway with the page and keys of two tenants."""
    keys = write_keys(tmp_path_factory.mktemp("chat") / "keys.toml", {A: "tenant = 'a'", B: "tenant = 'b'"})
    addresses = ("--engines", tiny_quire.addresses["engine"], "--kvmanager", tiny_quire.addresses["KV manager"])
    gateway = service(*GATEWAY, *addresses, "--api-keys", str(keys))
    gateway.output.wait_for("gateway is ready")
    url = message_of(gateway.output.wait_for("chat page at ")).split(" at ")[1].removesuffix("/chat/")
    with httpx.Client(base_url=url, timeout=CALL_SECONDS) as client:
        yield client


def test_with_api_keys_the_files_are_open_and_the_rest_needs_a_key(keyed: httpx.Client) -> None:
    assert keyed.get("/chat/").status_code == 200
    assert keyed.get("/chat/chat.js").status_code == 200
    for path in ("models", f"blocks/{new_id()}"):
        answer = keyed.get(f"/chat/{path}")
        assert rejection(answer) == (401, "invalid_api_key"), path
    assert keyed.get("/chat/models", headers=bearer(A)).status_code == 200


def test_a_tenant_reads_the_blocks_of_its_own_requests_alone(keyed: httpx.Client) -> None:
    name = new_id()
    with running_chat(keyed, name, A):
        with watch(keyed, name, A) as events:
            kind, state = next(events)
            assert kind == "blocks"
            assert state["sequences"][0]["table"]
        other = keyed.get(f"/chat/blocks/{name}", headers=bearer(B))  # refused after the time that a request may take
        assert rejection(other) == (404, "request_not_found")
        assert other.json()["error"]["message"] == "no request with this id runs at this gateway"


def test_a_gateway_serves_no_page_by_default_and_no_blocks_without_a_kv_manager(
    tiny_quire: RunningQuire, service: Callable[..., RunningService]
) -> None:
    alone = ("--engines", tiny_quire.addresses["engine"])
    for options, expected in ((GATEWAY[:-2], 404), (GATEWAY, 200)):
        gateway = service(*options, *alone)
        gateway.output.wait_for("gateway is ready")
        url = message_of(gateway.output.wait_for("listens for HTTP at ")).split(" at ")[1]
        with httpx.Client(base_url=url, timeout=CALL_SECONDS) as client:
            assert client.get("/chat/").status_code == expected
            refused = client.get(f"/chat/blocks/{new_id()}")
            assert refused.status_code == (404 if expected == 404 else 503)
    assert "has no KV manager" in refused.json()["error"]["message"]


def test_a_gateway_that_drains_ends_watches_of_requests_that_have_not_arrived(
    tiny_quire: RunningQuire, service: Callable[..., RunningService]
) -> None:
    addresses = ("--engines", tiny_quire.addresses["engine"], "--kvmanager", tiny_quire.addresses["KV manager"])
    gateway = service(*GATEWAY, *addresses)
    gateway.output.wait_for("gateway is ready")
    url = message_of(gateway.output.wait_for("listens for HTTP at ")).split(" at ")[1]
    path = f"/chat/blocks/{new_id()}"
    with httpx.Client(base_url=url, timeout=CALL_SECONDS) as client, ThreadPoolExecutor(2) as pool:
        both = as_completed([pool.submit(client.get, path) for _ in range(2)])
        assert next(both).result().status_code == 409, "the other one watches"
        gateway.process.terminate()
        answer = next(both).result()
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "the gateway is draining")
    assert gateway.ended() == 0
