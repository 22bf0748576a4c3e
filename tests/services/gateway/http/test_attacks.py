"""Attacks on a gateway with HTTPS and API keys, while the stream of another tenant continues undisturbed.

Attacks over gRPC are in tests/services/faults/test_attacks.py. Attacks that need no keys are in test_bounds.py.
"""

import base64
import json
import os
import random
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.gateway.access.api_keys import make_key
from services.runtime.logs.records import message_of
from tests.api_keys import write_keys
from tests.certificates import Authority
from tests.faults import wait_until
from tests.load import SLOW_SEED
from tests.running.neighbour import NEIGHBOUR_TOKENS, Neighbour, Pieces
from tests.running_quire import CALL_SECONDS, RunningQuire, RunningService
from tests.services.gateway.http.responses import events, read_all, rejection
from tests.services.runtime.test_tls import name_shown, version_spoken
from tests.timing import standing_still

ENDS = ("request ended ", "request refused ")  # lines that have names which clients gave
SECRET_PROMPT = "The launch code of the heron is seventeen bluebells and a teapot"
# Half a megabyte, because of the log probabilities: twice the buffers between a server and a client with a receive
# buffer of RECEIVE_BYTES.
LONG_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "On and on"}], "max_tokens": 400}
LONG_CHAT |= {"ignore_eos": True, "stream": True, "logprobs": True, "top_logprobs": 20}
RECEIVE_BYTES = 4096
# Options for limits that no client reaches, even on a slow machine.
LONG_LIMITS = ("--http-write-seconds", "120", "--slow-client-seconds", "120", "--link-timeout-seconds", "120")

A, B, EXPIRED, SINGLE, FRUGAL, HUMBLE = KEYS = [make_key() for _ in range(6)]
ENTRIES = {
    A: "tenant = 'a'",
    B: "tenant = 'b'",
    EXPIRED: "tenant = 'a'\nexpires = 2026-01-01T00:00:00Z",
    SINGLE: "tenant = 'single'\nmax_concurrent_requests = 1",
    FRUGAL: "tenant = 'frugal'\ntokens_per_minute = 100",
    HUMBLE: "tenant = 'humble'\nbest_priority = 0",
}


class SecuredGateway:
    """A gateway with API keys and TLS, and its clients."""

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
        self.clients = {key: self.client(key) for key in KEYS}

    def client(self, key: str = "") -> httpx.Client:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, verify=self._context, headers=headers, timeout=CALL_SECONDS)

    def complete(self, key: str, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        return self.clients[key].post("/v1/completions", json=body(**fields), headers=headers)

    def connect(self, receive_bytes: int) -> ssl.SSLSocket:
        plain = socket.socket()
        plain.settimeout(CALL_SECONDS)
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        plain.connect(self.place)
        return self._context.wrap_socket(plain, server_hostname="localhost")

    @contextmanager
    def held(self, key: str, **fields: Any) -> Iterator[httpx.Response]:
        """Start a stream that does not end inside, because its client does not read it."""
        options = [(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)]
        transport = httpx.HTTPTransport(verify=self._context, socket_options=options)
        headers = {"authorization": f"Bearer {key}"}
        with (
            httpx.Client(base_url=self.url, transport=transport, timeout=CALL_SECONDS, headers=headers) as client,
            client.stream("POST", "/v1/chat/completions", json={**LONG_CHAT, **fields}) as response,
        ):
            assert response.status_code == 200, response.read()
            yield response

    def chat(self, key: str, name: str = "", **fields: Any) -> httpx.Response:
        """Send a short chat, with `name` as request id."""
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "ignore_eos": True, **fields}
        named = {"request_id": name} if name else {}
        return self.clients[key].post("/v1/chat/completions", json={**chat, **named})

    def close(self) -> None:
        for client in (self.anyone, *self.clients.values()):
            client.close()


@pytest.fixture(scope="module")
def secured(
    tiny_quire: RunningQuire, service: Callable[..., RunningService], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SecuredGateway]:
    """A gateway at the tiny engine. After the tests, its log has no secrets and no header that a client made up."""
    folder = tmp_path_factory.mktemp("secured")
    keys, authority = write_keys(folder / "keys.toml", ENTRIES), Authority(folder)
    certificate, key = authority.issue("front")
    gateway = service(
        *("gateway", "--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"),
        *("--engines", tiny_quire.addresses["engine"], "--api-keys", str(keys)),
        *("--tls-certificate", str(certificate), "--tls-key", str(key), *LONG_LIMITS),
    )
    gateway.output.wait_for("gateway is ready")
    one = SecuredGateway(gateway, authority, (certificate, key))
    yield one
    one.close()
    assert gateway.close() == 0
    log = "\n".join(gateway.output.lines)
    secrets = ("Bearer", "authorization", "Traceback", "launch code", "heron", "bluebells", "passwd")
    assert [secret for secret in (*KEYS, *secrets) if secret in log] == []
    assert [line for line in gateway.output.lines if "evil" in line and not message_of(line).startswith(ENDS)] == []


def texts_over_http(client: httpx.Client) -> Pieces:
    request = body(prompt="Pages of memory, again and", max_tokens=NEIGHBOUR_TOKENS, seed=SLOW_SEED, stream=True)
    with client.stream("POST", "/v1/completions", json=request) as response:
        for event in events(response):
            yield event["choices"][0]["text"]


@pytest.fixture(scope="module", autouse=True)
def neighbour(secured: SecuredGateway) -> Iterator[Neighbour]:
    one = Neighbour(lambda: texts_over_http(secured.clients[B]))
    yield one
    one.close()
    assert one.faults == []
    assert one.streams > 0


@pytest.fixture(autouse=True)
def _neighbour_is_undisturbed(tiny_quire: RunningQuire, neighbour: Neighbour) -> Iterator[None]:
    yield
    neighbour.wait_for_tokens()
    assert tiny_quire.settled_pool(sequences=1).sequences <= 1, "a rejected request holds blocks"


def body(**fields: Any) -> dict[str, Any]:
    return {"prompt": SECRET_PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}


# Keys.


OPEN = ("/live", "/health", "/ready", "/ping", "/version", "/docs", "/redoc", "/openapi.json")


def test_probes_version_and_documentation_need_no_key(secured: SecuredGateway) -> None:
    assert {secured.anyone.get(path).status_code for path in OPEN} == {200}
    assert httpx.get(secured.gateway.metrics_url).status_code == 200  # a separate port


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([], "a valid API key is needed"),
        ([f"Bearer {A[:-1]}!"], "a valid API key is needed"),
        (["Basic " + base64.b64encode(f"a:{A}".encode()).decode()], "a valid API key is needed"),
        ([f"Bearer {A}", f"Bearer {B}"], "a valid API key is needed"),
        (["Bearer \xff\xfe"], "a valid API key is needed"),
        ([f"Bearer {EXPIRED}"], "the API key has expired"),
    ],
    ids=["none", "wrong", "basic", "two", "no ASCII", "expired"],
)
def test_all_other_paths_need_a_valid_key(secured: SecuredGateway, values: list[str], words: str) -> None:
    headers = [(b"authorization", value.encode("latin-1")) for value in values]
    described = secured.anyone.get("/openapi.json").json()["paths"]
    calls = [(method, path) for path, methods in described.items() for method in methods if path not in OPEN]
    assert len(calls) == 16
    answers = [secured.anyone.request(method, path, headers=headers, json={}) for method, path in calls]
    assert {(answer.status_code, answer.headers["www-authenticate"]) for answer in answers} == {(401, "Bearer")}
    errors = [answer.json()["error"] for answer in answers]
    assert {error["type"] for error in errors} == {"authentication_error"}
    assert all(error["message"].startswith(words) for error in errors)
    of_openai = [error for (_, path), error in zip(calls, errors, strict=True) if "/messages" not in path]
    assert len(of_openai) == 14
    assert all(error == {**of_openai[0], "param": None, "code": "invalid_api_key"} for error in of_openai)


# Tenants.


def test_a_request_id_in_use_is_rejected_for_its_tenant_alone_until_the_request_ends(secured: SecuredGateway) -> None:
    named = {"request_id": "x"}
    with secured.held(A, **named) as response:
        assert response.headers["x-request-id"] == "chatcmpl-x"
        assert rejection(secured.chat(A, "x")) == (409, "request_is_live")
        for name in ("x", "a/x", "a/chatcmpl-x"):
            assert secured.chat(B, name).headers["x-request-id"] == f"chatcmpl-{name}"
        assert secured.chat(A, "y").status_code == 200
    wait_until(lambda: secured.chat(A, "x").status_code == 200, "the request of the disconnected client has ended")
    with secured.clients[A].stream("POST", "/v1/completions", json=body(stream=True, **named)) as response:
        assert response.headers["x-request-id"] == "cmpl-x"
        assert len(list(events(response))) > 1
    assert secured.complete(A, **named).status_code == 200  # at once, because the client read the whole stream


def test_a_rejected_request_has_its_id_in_the_header_and_in_the_log(secured: SecuredGateway) -> None:
    never = secured.complete(SINGLE, prompt=["a", "b"])
    assert (never.status_code, never.json()["error"]["param"]) == (400, "prompt")
    with secured.held(SINGLE):
        rejected = [secured.complete(SINGLE, request_id="one-too-many"), secured.complete(SINGLE)]
        assert secured.complete(A).status_code == 200
    assert [rejection(one) for one in rejected] == [(429, "overloaded")] * 2
    assert rejected[0].json()["error"]["type"] == "rate_limit_error"
    names = [one.headers["x-request-id"] for one in rejected]
    assert names[0] == "cmpl-one-too-many"
    assert names[1].startswith("cmpl-")
    denied = secured.chat(HUMBLE, "denied", priority=-1)
    assert (denied.status_code, denied.headers["x-request-id"]) == (403, "chatcmpl-denied")
    for logged in (*(f"single/{name}" for name in names), "humble/chatcmpl-denied"):
        line = secured.gateway.output.wait_for(logged)
        assert "request ended" in line
        assert "tiny-llama" in line


def test_a_request_without_a_valid_key_has_its_id_in_the_header(secured: SecuredGateway) -> None:
    def returned_id(given: str) -> str:
        response = secured.anyone.post("/v1/completions", json=body(), headers={"x-request-id": given})
        assert response.status_code == 401
        return response.headers["x-request-id"]

    assert returned_id("mine") == "mine"
    assert returned_id("not an id") != "not an id"


def test_the_token_rate_bounds_several_requests_and_several_prompts_of_one(secured: SecuredGateway) -> None:
    answers = [secured.complete(FRUGAL, prompt=[5] * 10, max_tokens=40) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert "of its 100 tokens per minute left: this request can use 50" in answers[2].json()["error"]["message"]
    assert 0 < int(answers[2].headers["retry-after"]) <= 30  # 50 tokens are missing, 100 are added in 60 s
    assert rejection(secured.complete(FRUGAL, prompt=["x"] * 50)) == (429, "overloaded")


# Names and headers.


PATHS = ("../../../../etc/passwd", "/etc/passwd", "file:///etc/passwd", "..\\..\\etc\\passwd", "passwd\x00", "~/passwd")


def test_a_path_as_model_name_is_unknown_and_no_file_is_read(secured: SecuredGateway, tmp_path: Path) -> None:
    pipes = [tmp_path / name for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "model")]
    for pipe in pipes:
        os.mkfifo(pipe)
    requests: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "x"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
        "/tokenize": {"prompt": "x"},
        "/detokenize": {"tokens": [1]},
    }
    for model in (*PATHS, str(tmp_path), str(tmp_path / "model"), f"../../../../..{tmp_path}"):
        for path, fields in requests.items():
            rejected = secured.clients[A].post(path, json={**fields, "model": model})
            assert rejection(rejected) == (404, "model_not_found"), (path, model)
    for pipe in pipes:  # the error proves that no reader has the pipe open
        with pytest.raises(OSError, match="No such device or address"):
            os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)


def test_an_encoded_header_in_a_request_id_or_model_name_is_not_decoded(secured: SecuredGateway) -> None:
    name = "a%0d%0aset-cookie:evil=1"
    assert secured.complete(A, {"x-request-id": name}).headers["x-request-id"] == name
    rejected = secured.complete(A, model="m\r\nset-cookie: evil=1")
    assert rejection(rejected) == (404, "model_not_found")
    assert "set-cookie" not in rejected.headers


# TLS.


def test_a_client_without_tls_gets_no_response(secured: SecuredGateway) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{secured.address}/health")
    with socket.create_connection(secured.place, 10) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"HTTP" not in read_all(connection)
    assert secured.anyone.get("/health").status_code == 200


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_tls_below_version_1_2_is_rejected(secured: SecuredGateway) -> None:
    versions = (ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3)
    old, older, *new = [version_spoken(secured.address, version) for version in versions]
    assert new == ["TLSv1.2", "TLSv1.3"]
    assert {old, older} <= {"SSLEOFError", "SSLZeroReturnError", "SSLError", "ConnectionResetError"}


def port_of(response: httpx.Response) -> int:
    return int(response.extensions["network_stream"].get_extra_info("client_addr")[1])


def test_a_replaced_certificate_is_used_for_new_connections_and_open_ones_continue(
    secured: SecuredGateway, tiny_quire: RunningQuire
) -> None:
    ca, lines = secured.authority.ca, secured.gateway.output.lines
    request = body(max_tokens=50, seed=SLOW_SEED, stream=True)
    with secured.client(A) as old, old.stream("POST", "/v1/completions", json=request) as response:
        with standing_still(tiny_quire.children()["engine"]):
            assert name_shown(secured.address, ca) == "front"
            seen = len(lines)
            for new, there in zip(secured.authority.issue("behind"), secured.certificate, strict=True):
                new.replace(there)
            secured.gateway.output.wait_for("TLS: reloaded", after=seen)
            assert name_shown(secured.address, ca) == "behind"
        port = port_of(response)
        assert [event["choices"][0]["finish_reason"] for event in events(response)][-1] == "length"
        with old.stream("GET", "/v1/models") as again:
            assert (again.status_code, port_of(again)) == (200, port)


def hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


noise = random.Random(3)
GARBAGE = {
    "random bytes": noise.randbytes(5000),
    "zeros": bytes(5000),
    "an invalid record of 16 KB": b"\x16\x03\x01\x40\x00" + noise.randbytes(16384),
    "a heartbeat": b"\x18\x03\x02\x00\x03\x01\x40\x00",
    "an alert": b"\x15\x03\x01\x00\x02\x02\x28",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "noise after a hello": hello() + noise.randbytes(5000),
    "a hello, twice": hello() + hello(),
}


def test_malformed_tls_closes_only_its_connection_and_is_not_logged(secured: SecuredGateway) -> None:
    output = secured.gateway.output
    seen = len(output.lines)
    for garbage in GARBAGE.values():
        with socket.create_connection(secured.place, CALL_SECONDS) as connection:
            with suppress(OSError):
                connection.sendall(garbage)
                connection.shutdown(socket.SHUT_WR)  # some garbage is the beginning of a record
            assert b"HTTP" not in read_all(connection)
    assert secured.chat(A, "after-garbage").status_code == 200
    output.wait_for("after-garbage", after=seen)  # earlier lines are in the log by now
    assert [line for line in output.lines[seen:] if not message_of(line).startswith(ENDS)] == []


def test_a_connection_reset_ends_its_generation(secured: SecuredGateway) -> None:
    content = json.dumps({**LONG_CHAT, "request_id": "broken"}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\n" % A.encode()
    length = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(content)
    with secured.connect(RECEIVE_BYTES) as connection:
        connection.sendall(head + length + content)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
        assert rejection(secured.chat(A, "broken")) == (409, "request_is_live")
        os.close(connection.detach())  # without close_notify and with unread data, so that TCP sends a reset
    wait_until(lambda: secured.chat(A, "broken").status_code == 200, "the generation has ended")
