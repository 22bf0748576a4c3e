"""What somebody may try at the HTTPS of a gateway that asks for keys, while another tenant's stream goes on.

The same for gRPC is in tests/services/test_attacks.py. What needs neither keys nor TLS is in test_bounds.py, beside
this: requests drop by drop, connections that stay silent and too many of them, bodies and heads that are too large (a
prompt of 10 MB: 413), gzip bombs, deep and ambiguous JSON, what is no HTTP, clients that do not read. Mutual TLS is in
tests/services/runtime/test_tls.py.
"""

import base64
import json
import os
import random
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.gateway.access.api_keys import make_key
from tests.api_keys import write_keys
from tests.certificates import Authority
from tests.faults import wait_until
from tests.running.neighbour import NEIGHBOUR_TOKENS, Neighbour, Pieces
from tests.running_quire import CALL_SECONDS, RunningQuire, RunningService
from tests.services.gateway.held import LONG_CHAT, RECEIVE_BYTES, held_stream
from tests.services.runtime.test_tls import name_shown, version_spoken
from tests.timing import standing_still

SECRET_PROMPT = "The launch code of the heron is seventeen bluebells and a teapot"
READ_SECONDS = 2
# What a gateway is started with that gives no client up before a slow test is through.
PATIENCE = ("--http-write-seconds", "120", "--slow-client-seconds", "120", "--link-timeout-seconds", "120")

A, B, EXPIRED, SINGLE, FRUGAL, HUMBLE = KEYS = [make_key() for _ in range(6)]
ENTRIES = {
    A: "tenant = 'a'",
    B: "tenant = 'b'",
    EXPIRED: "tenant = 'a'\nexpires = 2026-01-01T00:00:00Z",
    SINGLE: "tenant = 'single'\nmax_concurrent_requests = 1",
    FRUGAL: "tenant = 'frugal'\ntokens_per_minute = 100",
    HUMBLE: "tenant = 'humble'\nbest_priority = 0",
}


class Guarded:
    """A gateway with keys and TLS before the tiny Quire's engine, as its clients see it."""

    def __init__(self, gateway: RunningService, authority: Authority, certificate: tuple[Path, Path]) -> None:
        self.gateway = gateway
        self.authority = authority
        self.certificate = certificate
        self.url = gateway.output.wait_for("gateway listens for HTTP at ").split(" at ")[1]
        self.address = self.url.removeprefix("https://")
        host, _, port = self.address.rpartition(":")
        self.place = host, int(port)
        self._context = ssl.create_default_context(cafile=str(authority.ca))
        self.anyone = self.client()
        self._of = {key: self.client(key) for key in KEYS}

    def client(self, key: str = "") -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, verify=self._context, headers=headers, timeout=CALL_SECONDS)

    def of(self, key: str) -> httpx.Client:
        return self._of[key]

    def complete(self, key: str, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        return self.of(key).post("/v1/completions", json=body(**fields), headers=headers)

    def cached(self, key: str, **fields: Any) -> int:
        """Complete, and return the tokens of the prompt that were found in the cache."""
        usage = self.complete(key, **fields).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    def connect(self, receive_bytes: int | None = None) -> ssl.SSLSocket:
        """Open a connection of TLS, perhaps with a buffer of another size."""
        plain = socket.socket()
        plain.settimeout(CALL_SECONDS)
        if receive_bytes is not None:
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        plain.connect(self.place)
        return self._context.wrap_socket(plain, server_hostname="localhost")

    def held(self, key: str, headers: dict[str, str] | None = None) -> AbstractContextManager[httpx.Response]:
        """Begin a stream that does not end inside."""
        shown = {"authorization": f"Bearer {key}", **(headers or {})}
        return held_stream(self.url, shown, self._context)

    def chat(self, key: str, name: str = "", **fields: Any) -> httpx.Response:
        """Ask for a short chat, perhaps with an id."""
        asked = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "ignore_eos": True, **fields}
        headers = {"x-request-id": name} if name else {}
        return self.of(key).post("/v1/chat/completions", json=asked, headers=headers)

    def send(self, data: bytes) -> tuple[int, dict[str, str], bytes]:
        """Send bytes over TLS, and return status, headers and body of the response.

        The gateway may keep a connection open after a rejected request, so this does not wait for it to close.
        """
        with self.connect() as connection:
            connection.sendall(data)
            response = HTTPResponse(connection)
            response.begin()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()

    def close(self) -> None:
        for client in (self.anyone, *self._of.values()):
            client.close()


@pytest.fixture(scope="module")
def start(
    tiny_quire: RunningQuire, service: Callable[..., RunningService], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Guarded]:
    """Starts a gateway with keys and a certificate, and further arguments."""

    def start(*arguments: str) -> Guarded:
        folder = tmp_path_factory.mktemp("guarded")
        keys, authority = write_keys(folder / "keys.toml", ENTRIES), Authority(folder)
        certificate, key = authority.issue("front")
        gateway = service(
            *("gateway", "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"),
            *("--engines", tiny_quire.addresses["engine"], "--api-keys", str(keys)),
            *("--tls-certificate", str(certificate), "--tls-key", str(key), *arguments),
        )
        gateway.output.wait_for("gateway is ready")
        return Guarded(gateway, authority, (certificate, key))

    return start


@pytest.fixture(scope="module")
def hasty(start: Callable[..., Guarded]) -> Iterator[Guarded]:
    """One that gives up soon who does not go on. That is for the tests of that alone: a slow machine is no attacker."""
    one = start("--http-read-seconds", str(READ_SECONDS))
    yield one
    one.close()
    assert one.gateway.close() == 0


@pytest.fixture(scope="module")
def guarded(start: Callable[..., Guarded]) -> Iterator[Guarded]:
    one = start(*PATIENCE)
    gateway = one.gateway
    yield one
    one.close()
    assert gateway.close() == 0
    log = "\n".join(gateway.output.lines)
    for secret in (
        *KEYS,
        "Bearer",
        "authorization",
        "Traceback",
        "launch code",
        "heron",
        "bluebells",
        "passwd",
    ):
        assert secret not in log
    assert [line for line in gateway.output.lines if "evil" in line and not line.startswith("request ended ")] == []


def texts_over_http(client: httpx.Client) -> Pieces:
    asked = body(prompt="Pages of memory, again and", max_tokens=NEIGHBOUR_TOKENS, stream=True)
    with client.stream("POST", "/v1/completions", json=asked) as response:
        for event in events(response):
            yield event["choices"][0]["text"]


@pytest.fixture(scope="module", autouse=True)
def neighbour(guarded: Guarded) -> Iterator[Neighbour]:
    one = Neighbour(lambda: texts_over_http(guarded.of(B)))
    yield one
    one.close()
    assert one.faults == []
    assert one.streams > 0


@pytest.fixture(autouse=True)
def _nobody_is_disturbed(tiny_quire: RunningQuire, neighbour: Neighbour) -> Iterator[None]:
    yield
    neighbour.see_it_go_on()
    assert tiny_quire.settled_pool(sequences=1).sequences <= 1, "a refused request holds blocks"


def body(**fields: Any) -> dict[str, Any]:
    return {"prompt": SECRET_PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    response.raise_for_status()
    lines = (line.removeprefix("data: ") for line in response.iter_lines() if line)
    return (json.loads(line) for line in lines if line != "[DONE]")


def refusal(response: httpx.Response) -> tuple[int, str]:
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return response.status_code, error["code"]


def read_all(connection: socket.socket) -> bytes:
    parts = []
    with suppress(ConnectionResetError):
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


# Keys.


OPEN = ("/live", "/health", "/ready", "/version", "/docs", "/redoc", "/openapi.json")


def test_only_what_tells_of_the_server_and_its_interface_is_open_without_a_key(guarded: Guarded) -> None:
    assert {guarded.anyone.get(path).status_code for path in OPEN} == {200}
    assert httpx.get(guarded.gateway.metrics_url).status_code == 200  # a port of its own


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([], "a valid API key is needed"),
        ([f"Bearer {A[:-1]}!"], "a valid API key is needed"),
        (["Bearer"], "a valid API key is needed"),
        ([A], "a valid API key is needed"),
        (["Basic " + base64.b64encode(f"a:{A}".encode()).decode()], "a valid API key is needed"),
        ([f"Bearer {A}", f"Bearer {B}"], "a valid API key is needed"),
        ([f"Bearer {A}, Bearer {B}"], "a valid API key is needed"),
        (["Bearer \xff\xfe"], "a valid API key is needed"),
        ([f"Bearer {EXPIRED}"], "the API key has expired"),
    ],
    ids=["none", "wrong", "empty", "no scheme", "basic", "two", "two in one", "no ASCII", "expired"],
)
def test_nothing_else_is_open_without_a_valid_key(guarded: Guarded, values: list[str], words: str) -> None:
    headers = [(b"authorization", value.encode("latin-1")) for value in values]
    described = guarded.anyone.get("/openapi.json").json()["paths"]
    calls = [(method, path) for path, methods in described.items() for method in methods if path not in OPEN]
    assert len(calls) == 6
    answers = [guarded.anyone.request(method, path, headers=headers, json={}) for method, path in calls]
    assert {refusal(answer) for answer in answers} == {(401, "invalid_api_key")}
    assert {answer.headers["www-authenticate"] for answer in answers} == {"Bearer"}
    errors = [answer.json()["error"] for answer in answers]
    assert all(error == errors[0] for error in errors), "one call says more than another"
    assert (errors[0]["type"], errors[0]["param"]) == ("authentication_error", None)
    assert errors[0]["message"].startswith(words)


def test_10_mb_without_a_key_are_refused_for_the_key_and_with_one_for_their_size(guarded: Guarded) -> None:
    large = json.dumps(body(prompt="x" * 10_000_000))
    headers = {"content-type": "application/json"}
    for client, expected in ((guarded.anyone, (401, "invalid_api_key")), (guarded.of(A), (413, "body_too_large"))):
        assert refusal(client.post("/v1/completions", content=large, headers=headers)) == expected


# Tenants.


def test_no_tenant_finds_anothers_prompt_in_the_cache_whatever_salt_it_gives(guarded: Guarded) -> None:
    prompt = f"{SECRET_PROMPT}, which nobody has said before"

    def own() -> int:
        return guarded.cached(A, prompt=prompt, cache_salt="s")

    assert own() == 0
    for salt in ("s", "", "a", "\x01as", "a/s", "\u00ff\x01as"):
        wait_until(lambda: own() > 0, "it is in the cache, from which the neighbour may have driven it")
        assert guarded.cached(B, prompt=prompt, cache_salt=salt) == 0
    wait_until(lambda: own() > 0, "it is in the cache")
    assert guarded.cached(A, prompt=prompt, cache_salt="other") == 0


def test_a_live_id_is_taken_for_its_own_tenant_alone_and_free_again_after_it(guarded: Guarded) -> None:
    named = {"x-request-id": "x"}
    with guarded.held(A, named) as response:
        assert response.headers["x-request-id"] == "chatcmpl-x"
        assert refusal(guarded.chat(A, "x")) == (409, "request_is_live")
        assert refusal(guarded.chat(A, "", request_id="x")) == (409, "request_is_live")
        for name in ("x", "a/x", "a/chatcmpl-x"):
            assert guarded.chat(B, name).headers["x-request-id"] == f"chatcmpl-{name}"
        assert guarded.chat(A, "y").status_code == 200
    wait_until(lambda: guarded.chat(A, "x").status_code == 200, "the gateway has noticed that its client is gone")
    with guarded.of(A).stream("POST", "/v1/completions", json=body(stream=True), headers=named) as response:
        assert response.headers["x-request-id"] == "cmpl-x"
        assert len(list(events(response))) > 1
    assert guarded.complete(A, named).status_code == 200  # at once: it was told to its end


def test_a_tenant_at_its_limit_of_requests_is_refused_and_another_is_not(guarded: Guarded) -> None:
    with guarded.held(SINGLE):
        refused = guarded.complete(SINGLE)
        assert (refusal(refused), refused.json()["error"]["type"]) == ((429, "overloaded"), "rate_limit_error")
        assert int(refused.headers["retry-after"]) >= 1
        assert guarded.complete(A).status_code == 200
    wait_until(lambda: guarded.complete(SINGLE).status_code == 200, "the tenant's place is free")


def test_a_refused_request_has_its_id_in_the_header_and_in_the_log(guarded: Guarded) -> None:
    with guarded.held(SINGLE):
        refused = [guarded.complete(SINGLE, {"x-request-id": "one-too-many"}), guarded.complete(SINGLE)]
    assert [refusal(one) for one in refused] == [(429, "overloaded")] * 2
    names = [one.headers["x-request-id"] for one in refused]
    assert names[0] == "cmpl-one-too-many"
    assert names[1].startswith("cmpl-")
    denied = guarded.chat(HUMBLE, "denied", priority=-1)
    assert (denied.status_code, denied.headers["x-request-id"]) == (403, "chatcmpl-denied")
    for logged in (*(f"single/{name}" for name in names), "humble/chatcmpl-denied"):
        line = guarded.gateway.output.wait_for(logged)
        assert "request ended" in line
        assert "tiny-llama" in line, "the model was read"


def test_a_request_without_a_valid_key_has_its_id_in_the_header(guarded: Guarded) -> None:
    def name(given: str) -> str:
        answer = guarded.anyone.post("/v1/completions", json=body(), headers={"x-request-id": given})
        assert answer.status_code == 401
        return answer.headers["x-request-id"]

    assert name("mine") == "mine"
    assert name("no id") != "no id"


def test_tokens_beyond_those_of_a_minute_are_refused_until_the_moment_that_is_told(guarded: Guarded) -> None:
    fields = {"prompt": [5] * 10, "max_tokens": 40}
    begun = time.monotonic()
    answers = [guarded.complete(FRUGAL, **fields) for _ in range(3)]
    passed = time.monotonic() - begun
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert "of its 100 tokens per minute left: this request can use 50" in answers[2].json()["error"]["message"]
    seconds = int(answers[2].headers["retry-after"])
    assert 30 - passed <= seconds <= 30  # 50 tokens are missing, of which 100 come in 60 s
    assert seconds * 1000 - 1000 <= int(answers[2].headers["retry-after-ms"]) <= seconds * 1000
    assert refusal(guarded.complete(FRUGAL, prompt=["x"] * 50)) == (429, "overloaded")  # many in one as well


# Names and headers.


PATHS = ("../../../../etc/passwd", "/etc/passwd", "file:///etc/passwd", "..\\..\\etc\\passwd", "passwd\x00", "~/passwd")


def test_a_model_that_is_a_path_is_unknown_and_nothing_is_read_there(guarded: Guarded, tmp_path: Path) -> None:
    pipes = [tmp_path / name for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model")]
    for pipe in pipes:
        os.mkfifo(pipe)
    asked: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "x"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        "/tokenize": {"prompt": "x"},
        "/detokenize": {"tokens": [1]},
    }
    for model in (*PATHS, str(tmp_path), str(tmp_path / "model"), f"../../../../..{tmp_path}"):
        for path, fields in asked.items():
            refused = guarded.of(A).post(path, json={**fields, "model": model})
            assert refusal(refused) == (404, "model_not_found"), (path, model)
    for pipe in pipes:  # whoever opened one would still stand there
        with pytest.raises(OSError, match="No such device or address"):
            os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)


@pytest.mark.parametrize(
    "path",
    [
        b"/v1/models/../../../../etc/passwd",
        b"/v1/models/%2e%2e/%2e%2e/%2e%2e/etc/passwd",
        b"/v1/models/..%2f..%2f..%2fetc%2fpasswd",
        b"/v1/models/%252e%252e%252fetc%252fpasswd",
        b"/v1/models//etc/passwd",
        b"/v1/models/passwd%00.json",
        b"/v1/models/%c0%ae%c0%ae%c0%afetc%c0%afpasswd",
        b"/docs/../../../etc/passwd",
        b"/docs/oauth2-redirect/..%2f..%2fetc/passwd",
        b"//etc/passwd",
    ],
)
def test_no_path_leads_to_files(guarded: Guarded, path: bytes) -> None:
    request = b"GET %b HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\nconnection: close\r\n\r\n"
    status, _, content = guarded.send(request % (path, A.encode()))
    assert status == 404
    assert b"root:" not in content


@pytest.mark.parametrize(
    "name",
    [b"a\nset-cookie: evil=1", b"a\rset-cookie: evil=1", b"a\r\n set-cookie: evil=1", b"a\x00evil", b"a evil", b"\xff"],
    ids=["LF", "CR", "folded", "NUL", "blank", "no ASCII"],
)
def test_a_request_id_brings_no_header_into_the_answer(guarded: Guarded, name: bytes) -> None:
    content = json.dumps(body()).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\ncontent-type: application/json\r\n"
    rest = b"x-request-id: %b\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
    status, headers, text = guarded.send(head % A.encode() + rest % (name, len(content)) + content)
    assert status in (400, 200)
    assert "set-cookie" not in headers
    assert "evil" not in str(headers)
    assert b"evil" not in text


@pytest.mark.parametrize("name", ["a\r\nset-cookie: evil=1", "a\nb", "\u010d\u010aset-cookie:evil", "a" * 101, ""])
def test_a_request_id_in_the_body_neither(guarded: Guarded, name: str) -> None:
    refused = guarded.complete(A, request_id=name)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "request_id")
    assert not {"set-cookie", "x-request-id"} & set(refused.headers)


def test_what_only_looks_like_a_header_stays_in_its_place(guarded: Guarded) -> None:
    name = "a%0d%0aset-cookie:evil=1"
    assert guarded.complete(A, {"x-request-id": name}).headers["x-request-id"] == f"cmpl-{name}"
    refused = guarded.complete(A, model="m\r\nset-cookie: evil=1")
    assert refusal(refused) == (404, "model_not_found")
    assert "set-cookie" not in refused.headers


# TLS.


def test_a_plain_client_hears_nothing_and_a_tls_client_goes_on(guarded: Guarded) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{guarded.address}/health")
    with socket.create_connection(guarded.place, 10) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"HTTP" not in read_all(connection)
    assert guarded.anyone.get("/health").status_code == 200


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_no_version_of_tls_below_1_2_is_spoken(guarded: Guarded) -> None:
    versions = (ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3)
    old, older, *new = [version_spoken(guarded.address, version) for version in versions]
    assert new == ["TLSv1.2", "TLSv1.3"]
    assert {old, older} <= {"SSLEOFError", "SSLZeroReturnError", "SSLError", "ConnectionResetError"}


def port_of(response: httpx.Response) -> int:
    """Return the client's own port, of the connection that a response comes by."""
    return int(response.extensions["network_stream"].get_extra_info("client_addr")[1])


def test_a_replaced_certificate_is_shown_to_new_connections_while_old_ones_and_their_streams_go_on(
    guarded: Guarded, tiny_quire: RunningQuire
) -> None:
    ca, lines = guarded.authority.ca, guarded.gateway.output.lines
    asked = body(max_tokens=600, stream=True)
    with guarded.client(A) as old, old.stream("POST", "/v1/completions", json=asked) as response:
        with standing_still(tiny_quire.children()["engine"]):
            assert name_shown(guarded.address, ca) == "front"
            seen = len(lines)
            for new, there in zip(guarded.authority.issue("behind"), guarded.certificate, strict=True):
                new.replace(there)
            guarded.gateway.output.wait_for("TLS: reloaded", after=seen)
            assert name_shown(guarded.address, ca) == "behind"
        port = port_of(response)
        assert [event["choices"][0]["finish_reason"] for event in events(response)][-1] == "length"
        with old.stream("GET", "/v1/models") as again:
            assert (again.status_code, port_of(again)) == (200, port)


def hello() -> bytes:
    """Return the first bytes of a client of TLS."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


noise = random.Random(3)
GARBAGE = {
    "random bytes": noise.randbytes(5000),
    "zeros": bytes(5000),
    "a record of 16 KB that is none": b"\x16\x03\x01\x40\x00" + noise.randbytes(16384),
    "a heartbeat": b"\x18\x03\x02\x00\x03\x01\x40\x00",
    "an alert": b"\x15\x03\x01\x00\x02\x02\x28",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "noise after a hello": hello() + noise.randbytes(5000),
    "a hello, twice": hello() + hello(),
}


def test_bytes_that_are_no_tls_end_their_connection_alone_and_fill_no_log(hasty: Guarded) -> None:
    seen = len(hasty.gateway.output.lines)
    for garbage in GARBAGE.values():
        with socket.create_connection(hasty.place, CALL_SECONDS) as connection:
            with suppress(ConnectionResetError, BrokenPipeError):
                connection.sendall(garbage)
            assert b"HTTP" not in read_all(connection)
    wait_until(lambda: hasty.complete(A).status_code == 200, "others are answered")
    hasty.gateway.output.wait_for("request ended ", after=seen)  # what was said before stands before it
    assert [line for line in hasty.gateway.output.lines[seen:] if not line.startswith("request ended ")] == []


def test_who_does_not_go_on_is_given_up_before_and_after_the_handshake(hasty: Guarded) -> None:
    begun = time.monotonic()
    plain = [socket.create_connection(hasty.place, CALL_SECONDS) for _ in range(30)]
    for connection in plain[10:]:
        with suppress(ConnectionResetError, BrokenPipeError):  # given up already, on a slow machine
            connection.sendall(hello()[:100])
    shaken = [hasty.connect() for _ in range(10)]
    for spoken in shaken[5:]:
        with suppress(OSError):
            spoken.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
    wait_until(lambda: hasty.complete(A).status_code == 200, "others are answered")
    ends = [read_all(connection) for connection in (*plain, *shaken)]
    # Without a bound of ours a handshake may take a minute, and a connection is kept for longer.
    assert READ_SECONDS * 0.9 < time.monotonic() - begun < 45
    assert not any(b"HTTP" in end for end in ends[:30])
    assert all(end.startswith(b"HTTP/1.1 408 ") for end in ends[30:])
    for connection in (*plain, *shaken):
        connection.close()


def test_a_connection_that_breaks_without_a_farewell_ends_its_generation(guarded: Guarded) -> None:
    content = json.dumps({**LONG_CHAT, "request_id": "broken"}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\n" % A.encode()
    length = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(content)
    with guarded.connect(RECEIVE_BYTES) as connection:
        connection.sendall(head + length + content)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        assert refusal(guarded.chat(A, "broken")) == (409, "request_is_live")
        os.close(connection.detach())  # no close_notify, and what has come unread: a reset
    wait_until(lambda: guarded.chat(A, "broken").status_code == 200, "the generation has ended")
