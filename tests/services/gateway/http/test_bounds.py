"""Malformed, oversized and slow requests: each gets its status and does not affect other clients."""

import gzip
import http.client
import json
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.runtime.errors import GenerationFailed, Overloaded, RepeatedEngineLoss, ServiceError
from services.runtime.http.connection import HttpLimits
from services.runtime.statuses import STATUS
from services.runtime.tls import ServerContext, TLSFiles
from services.runtime.transport import CLIENT_MESSAGE_BYTES
from tests.certificates import Authority
from tests.faults import wait_until
from tests.running_quire import CALL_SECONDS
from tests.services.gateway.http.responses import events, read_all, rejection
from tests.services.gateway.http.scripted_server import CONNECTIONS, SHORT_LIMITS, ScriptedServer

JSON = {"content-type": "application/json"}
BODY = {"prompt": "x", "max_tokens": 2}
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
HALF_A_BODY = HEAD + b"content-length: 50\r\n\r\n{"


@pytest.fixture(scope="module")
def servers(tiny_model: Callable[[str], Path]) -> Iterator[tuple[ScriptedServer, ScriptedServer]]:
    folder = tiny_model("llama")
    with closing(ScriptedServer(folder)) as patient, closing(ScriptedServer(folder, SHORT_LIMITS)) as impatient:
        yield patient, impatient


@pytest.fixture
def server(servers: tuple[ScriptedServer, ScriptedServer]) -> Iterator[ScriptedServer]:
    yield from unchanged(servers[0])


@pytest.fixture
def impatient(servers: tuple[ScriptedServer, ScriptedServer]) -> Iterator[ScriptedServer]:
    yield from unchanged(servers[1])


def unchanged(server: ScriptedServer) -> Iterator[ScriptedServer]:
    """Check after a test that no request runs and that other clients are served."""
    yield server
    server.call(server.handler.hold.set)
    server.handler.rejection = server.handler.failure = None
    assert server.client.get("/health").status_code == 200
    server.settle()
    assert server.handler.running == 0


def post(server: ScriptedServer, content: Any, **headers: str) -> httpx.Response:
    return server.client.post("/v1/completions", content=content, headers=JSON | headers)


def raw(server: ScriptedServer, data: bytes) -> bytes:
    """Send bytes, which the server reads at once, and return all bytes until it closes."""
    with server.blocked():
        connection = socket.create_connection(server.place, timeout=CALL_SECONDS)
        connection.setblocking(False)
        sent = connection.send(data)
        connection.settimeout(CALL_SECONDS)
    with connection:
        with suppress(BrokenPipeError, ConnectionResetError):  # closed before all was sent
            connection.sendall(data[sent:])
        return read_all(connection)


def observed(server: ScriptedServer, send: Callable[[], object]) -> list[tuple[str, str, int]]:
    """Return the requests that the observer receives for those of `send`."""
    server.settle()  # a request is observed after its response was sent
    before = len(server.observer.requests)
    send()
    server.settle()
    return server.observer.requests[before:]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "not JSON"),
        (b"", "missing"),
        (b"\xff\xfe", "not UTF-8"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"prompt": "x", "temperature": NaN}', "NaN"),
        (b'{"prompt": "x", "temperature": -Infinity}', "Infinity"),
        (b'{"prompt": "x", "temperature": 1e999}', "temperature"),
        (b'{"prompt": "x", "prompt": "y"}', "duplicated"),
        (b'{"prompt": ' + b"[" * 65 + b"]" * 65 + b"}", "levels deep"),
        (b"[" * 1_000_000, "levels deep"),
        (b'{"a":' * 100_000, "levels deep"),
        (b'"' + b'\\"' * 1_000_000, "not JSON"),
        (b'{"seed": ' + b"9" * 5000 + b"}", "integer of more than 4300 digits"),
        (b'{"prompt": "x", "seed": 9223372036854775808}', "seed"),
        (b'{"prompt": "x", "temperature": "0.5"}', "temperature"),
        (b'{"prompt": "x", "nonsense": 1}', "nonsense"),
        (b'{"prompt": "x", "suffix": "y"}', "suffix is not supported"),
        (b'["prompt"]', "body"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_invalid_body_is_rejected_with_the_reason(server: ScriptedServer, content: bytes, reason: str) -> None:
    started = time.process_time()
    response = post(server, content)
    assert response.status_code == 400
    assert reason in response.json()["error"]["message"]
    assert time.process_time() - started < 3, "the parser does more than linear work"
    assert server.handler.running == 0


def test_brackets_in_strings_are_not_levels(server: ScriptedServer) -> None:
    assert post(server, json.dumps({**BODY, "prompt": '[{"' * 100, "stop": ["[{" * 200]})).status_code == 200


def test_an_oversized_body_is_rejected_before_it_is_read(server: ScriptedServer, impatient: ScriptedServer) -> None:
    assert rejection(post(server, b"x" * (CLIENT_MESSAGE_BYTES + 1))) == (413, "body_too_large")
    assert raw(impatient, HEAD + b"content-length: 99999999999\r\n\r\n").startswith(b"HTTP/1.1 413")
    fits = b'{"max_tokens": 1, "prompt": "' + b"x" * (CLIENT_MESSAGE_BYTES - 40) + b'"}'
    assert post(server, fits).status_code == 200


LARGE = 12 * 1024 * 1024  # larger than the client's send buffer and the server's receive buffer


def in_pieces(size: int) -> Iterator[bytes]:
    return (b"x" * 65536 for _ in range(size // 65536))


def by_http_client(server: ScriptedServer, path: str, body: Any, headers: dict[str, str]) -> tuple[int, bytes]:
    """Send the complete request before reading the response, as Python's http.client does."""
    with closing(http.client.HTTPConnection(*server.place, timeout=CALL_SECONDS)) as connection:
        connection.request("POST", path, body, JSON | headers)
        response = connection.getresponse()
        return response.status, response.read()


@pytest.mark.parametrize("closes", [{}, {"connection": "close"}], ids=["kept alive", "closing"])
@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/completions", {}, 413),
        ("/v1/completions", {"content-type": "text/plain"}, 415),
        ("/v1/completions", {"authorization": "Bearer wrong"}, 401),
        ("/nothing", {}, 404),
        ("/health", {}, 405),
        ("/v1/completions", {"a": "x" * 40_000}, 431),
        ("/v1/completions", {"a b": "c"}, 400),
    ],
    ids=["413", "415", "401", "404", "405", "431", "400"],
)
def test_a_client_that_sends_the_whole_request_first_receives_the_rejection(
    server: ScriptedServer, path: str, headers: dict[str, str], status: int, closes: dict[str, str]
) -> None:
    assert by_http_client(server, path, b"x" * LARGE, headers | closes)[0] == status
    assert by_http_client(server, path, in_pieces(LARGE), headers | closes)[0] == status


def test_an_http_1_0_client_that_sends_the_whole_request_first_receives_the_rejection(server: ScriptedServer) -> None:
    head = b"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % LARGE
    with socket.create_connection(server.place, timeout=CALL_SECONDS) as connection:
        connection.sendall(head)
        for piece in in_pieces(LARGE):
            connection.sendall(piece)
        assert read_all(connection).startswith(b"HTTP/1.1 413")


def test_a_rejected_expect_100_continue_closes_the_connection(server: ScriptedServer) -> None:
    answer = raw(server, HEAD + b"expect: 100-continue\r\ncontent-length: 99999999\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"\r\nconnection: close\r\n" in answer
    assert answer.count(b"HTTP/1.1") == 1


def test_the_rest_of_a_rejected_request_is_read_up_to_a_number_of_bytes(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.runtime.http.connection._MAX_UNREAD_BYTES", 1024 * 1024)
    for headers in ({}, {"connection": "close"}, {"a b": "c"}):
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            by_http_client(server, "/v1/completions", b"x" * LARGE, headers)


@pytest.mark.parametrize("closes", [b"", b"connection: close\r\n"], ids=["kept alive", "closing"])
def test_the_rest_of_a_rejected_request_is_read_up_to_a_time_limit(impatient: ScriptedServer, closes: bytes) -> None:
    head = b"POST /nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n" + closes
    with socket.create_connection(impatient.place, timeout=CALL_SECONDS) as connection:
        connection.sendall(head + b"\r\n")
        answer = connection.recv(65536)
        impatient.settle()  # the server has closed before the client did
        assert (answer + read_all(connection)).count(b"HTTP/1.1 ") == 1, "one response to one request"


def test_compressed_and_other_bodies_than_json_are_rejected(server: ScriptedServer) -> None:
    bomb = gzip.compress(b'{"prompt": "' + b"x" * 10_000_000 + b'"}', 1)
    assert rejection(post(server, bomb, **{"content-encoding": "gzip"})) == (415, "encoded_body")
    assert rejection(post(server, b"prompt=x", **{"content-type": "text/plain"})) == (415, "unsupported_media_type")


@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nhost: x\r\na: " + b"x" * 300_000,
        b"GET /" + b"x" * 300_000,
        b"GET /health HTTP/1.1\r\n" + b"".join(b"h%d: x\r\n" % number for number in range(200)) + b"\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a: " + b"x" * 40_000 + b"\r\n\r\n",
    ],
    ids=["header without end", "path without end", "many headers", "long header"],
)
def test_headers_that_are_too_large_are_rejected(server: ScriptedServer, head: bytes) -> None:
    def send() -> None:
        with socket.create_connection(server.place, timeout=CALL_SECONDS) as connection:
            with suppress(BrokenPipeError, ConnectionResetError):  # closed before all was sent
                for at in range(0, len(head), 20_000):
                    connection.sendall(head[at : at + 20_000])
            answer = read_all(connection)
        assert not answer or answer.startswith(b"HTTP/1.1 431")  # a reset can overtake it

    assert observed(server, send) == [("other", "other", 431)]


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + b"\x00" * 50,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /health HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: stream_chunks\r\n\r\n0\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\na b: c\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
        b"CONNECT example:443 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"G(T /health HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
    ids=["TLS", "HTTP/2", "half a line", "two lengths", "blank in a name", "negative length", "CONNECT", "no method"],
)
def test_malformed_http_is_rejected_and_counted_without_a_path(server: ScriptedServer, data: bytes) -> None:
    def send() -> None:
        assert raw(server, data).startswith(b"HTTP/1.1 400 Bad Request\r\n")

    assert observed(server, send) == [("other", "other", 400)]


@pytest.mark.parametrize("method", ["FOO", "get"])
def test_a_method_that_http_does_not_have_is_not_implemented(server: ScriptedServer, method: str) -> None:
    answer = raw(server, f"{method} /v1/responses HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 501 Not Implemented\r\n")
    error = {"type": "invalid_request_error", "param": None, "code": "not_implemented"}
    assert json.loads(body) == {"error": {"message": f"there is no method {method}", **error}}


@pytest.mark.parametrize(
    ("data", "requests"),
    [
        (b"", [("other", "other", 408)]),
        (b"GET /health HT", [("other", "other", 408)]),
        (HALF_A_BODY, [("/v1/completions", "POST", 408)]),
        (
            b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" + HALF_A_BODY,
            [("/health", "GET", 200), ("/v1/completions", "POST", 408)],
        ),
    ],
    ids=["nothing", "half a head", "half a body", "half a body after another request"],
)
def test_an_incomplete_request_times_out_and_is_counted_once(
    impatient: ScriptedServer, data: bytes, requests: list[tuple[str, str, int]]
) -> None:
    answers = []
    started = time.monotonic()
    assert observed(impatient, lambda: answers.append(raw(impatient, data))) == requests
    assert SHORT_LIMITS.read_seconds * 0.9 < time.monotonic() - started < 45  # idle connections are kept for 75 s
    assert b"HTTP/1.1 408 Request Timeout" in answers[0] or answers[0].startswith(b"HTTP/1.1 200")


def test_a_stalled_client_of_tls_times_out_before_and_after_the_handshake(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    encrypting = ServerContext(TLSFiles(*map(str, authority.issue("front")))).context
    trusting = ssl.create_default_context(cafile=str(authority.ca))
    limits = HttpLimits(CONNECTIONS, read_seconds=1, write_seconds=60)
    with closing(ScriptedServer(tiny_model("llama"), limits, encrypting)) as server, ExitStack() as stack:
        started = time.monotonic()
        plain, shaken = [], []
        for begun in (False, True):
            plain.append(stack.enter_context(socket.create_connection(server.place, CALL_SECONDS)))
            connection = socket.create_connection(server.place, CALL_SECONDS)
            shaken.append(stack.enter_context(trusting.wrap_socket(connection, server_hostname="localhost")))
            if begun:
                plain[-1].sendall(b"\x16\x03\x01\x00\xa5\x01\x00")
                shaken[-1].sendall(HALF_A_BODY[:20])
        with httpx.Client(base_url=server.url, verify=trusting, timeout=CALL_SECONDS) as other:
            assert other.get("/health").status_code == 200
        assert [read_all(connection) for connection in plain] == [b"", b""]
        assert [read_all(connection)[:13] for connection in shaken] == [b"HTTP/1.1 408 "] * 2
        # The defaults of the libraries are 60 s for a handshake and 75 s for an idle connection.
        assert 0.9 < time.monotonic() - started < 45


def test_blank_lines_do_not_keep_a_connection_open(impatient: ScriptedServer) -> None:
    with impatient.blocked():
        connection = socket.create_connection(impatient.place, timeout=CALL_SECONDS)
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    with connection:
        answer = connection.recv(65536)
        connection.sendall(b"\r\n")
        answer += read_all(connection)
    assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"408"]


def test_a_request_sent_byte_by_byte_times_out(impatient: ScriptedServer) -> None:
    with socket.create_connection(impatient.place, timeout=CALL_SECONDS) as connection:
        with suppress(BrokenPipeError, ConnectionResetError):
            for byte in b"GET /health HTTP/1.1\r\nhost: xxxxxxxxxxxxxxxxxxxxxxxx\r\n\r\n":
                connection.sendall(bytes([byte]))
                time.sleep(0.03)
        answer = read_all(connection)
    assert not answer or answer.startswith(b"HTTP/1.1 408")


def test_connections_above_the_limit_are_rejected_and_open_ones_are_served(server: ScriptedServer) -> None:
    def send() -> None:
        with httpx.Client(base_url=server.url, timeout=CALL_SECONDS) as client:
            assert client.get("/health").status_code == 200
            with server.blocked():  # so that it accepts all at once
                others = [socket.create_connection(server.place, timeout=CALL_SECONDS) for _ in range(CONNECTIONS + 2)]
            # The client's own connection counts, too.
            rejected = [read_all(one) for one in others[CONNECTIONS - 1 :]]
            assert [b"HTTP/1.1 503" in one and b"\r\nretry-after: 1\r\n" in one for one in rejected] == [True] * 3
            assert client.get("/health").status_code == 200
            for one in others:
                one.close()

    health = ("/health", "GET", 200)
    assert observed(server, send) == [health, *[("other", "other", 503)] * 3, health]


def test_a_client_that_does_not_read_is_disconnected(impatient: ScriptedServer) -> None:
    body = json.dumps({"prompt": "x" * 10_000, "max_tokens": 200, "stream": True}).encode()
    before, started = impatient.handler.started, time.monotonic()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with impatient.blocked():
            connection.connect(impatient.place)
            connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: impatient.handler.started > before, "the generation has started")
        wait_until(lambda: impatient.handler.running == 0, "it has ended, because 2 MB fill all buffers")
    assert time.monotonic() - started > SHORT_LIMITS.write_seconds * 0.9


@pytest.mark.parametrize(
    "name",
    [b"a\nset-cookie: evil=1", b"a\rset-cookie: evil=1", b"a\r\n set-cookie: evil=1", b"a\x00evil", b"a evil", b"\xff"],
    ids=["LF", "CR", "folded", "NUL", "space", "not ASCII"],
)
def test_a_request_id_adds_no_header_to_the_response(server: ScriptedServer, name: bytes) -> None:
    content = json.dumps(BODY).encode()
    rest = b"x-request-id: %b\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % (name, len(content))
    answer = raw(server, HEAD + rest + content)
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 200 "))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"evil" not in head
    assert b"\r\nset-cookie" not in body


@pytest.mark.parametrize("name", ["a\r\nset-cookie: evil=1", "a\nb", "\u010d\u010aset-cookie:evil", "a" * 101, ""])
def test_an_invalid_request_id_in_the_body_is_rejected(server: ScriptedServer, name: str) -> None:
    response = post(server, json.dumps({**BODY, "request_id": name}))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "request_id")
    assert "set-cookie" not in response.headers
    assert response.headers["x-request-id"].isalnum()
    assert response.headers["x-request-id"] != name


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
def test_no_path_leads_to_files(server: ScriptedServer, path: bytes) -> None:
    answer = raw(server, b"GET %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" % path)
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert b"root:" not in answer


def test_a_server_that_is_not_ready_is_alive(server: ScriptedServer) -> None:
    server.call(lambda: server.readiness.set(False))
    try:
        responses = {path: server.client.get(path) for path in ("/health", "/ready", "/ping", "/live")}
    finally:
        server.call(lambda: server.readiness.set(True))
    assert [rejection(responses[path]) for path in ("/health", "/ready", "/ping")] == [(503, "unavailable")] * 3
    assert responses["/live"].json() == {"status": "alive"}
    assert [server.client.get(path).status_code for path in responses] == [200] * 4


def test_unknown_paths_and_methods_get_errors_in_openais_format(server: ScriptedServer) -> None:
    for path in ("/v1/nothing", "/v1/completions/nothing"):
        missing = server.client.get(path)
        assert rejection(missing) == (404, "not_found")
        assert path in missing.json()["error"]["message"]
    wrong = server.client.get("/v1/completions")
    assert (rejection(wrong), wrong.headers["allow"]) == ((405, "method_not_allowed"), "POST")


def test_pipelined_requests_are_answered_in_order(server: ScriptedServer) -> None:
    one = b"GET /%b HTTP/1.1\r\nhost: x\r\n\r\n"
    last = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    answer = raw(server, one % b"health" + one % b"nothing" + last)
    assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"404", b"200"]
    many = raw(server, one % b"health" * 3000 + last)
    assert many.count(b"HTTP/1.1 200") == 3001


# Errors of the request handler


def test_an_invalid_api_key_is_rejected_before_the_body_is_read(server: ScriptedServer) -> None:
    response = post(server, b"{", authorization="Bearer wrong")
    assert rejection(response) == (401, "invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"
    post(server, json.dumps(BODY), authorization="Bearer good")
    assert server.handler.callers[-1].tenant == "theirs"
    assert server.client.get("/health", headers={"authorization": "Bearer wrong"}).status_code == 200


def test_a_full_queue_sends_retry_after(server: ScriptedServer) -> None:
    server.handler.rejection = Overloaded("the queue is full", retry_seconds=2.5)
    response = post(server, json.dumps(BODY))
    assert rejection(response) == (429, "overloaded")
    assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("3", "2500")
    assert "x-should-retry" not in response.headers
    server.handler.rejection = Overloaded("the tenant has no tokens left", retry_seconds=2000)
    assert post(server, json.dumps(BODY)).headers["x-should-retry"] == "false"
    assert post(server, json.dumps({**BODY, "stream": True})).status_code == 429


def test_a_request_lost_with_several_engines_is_not_to_be_retried(server: ScriptedServer) -> None:
    server.handler.rejection = RepeatedEngineLoss("3 engines were lost")
    response = post(server, json.dumps(BODY))
    assert rejection(response) == (500, "request_given_up")
    assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("kind", ServiceError.__subclasses__(), ids=lambda kind: kind.__name__)
def test_every_service_error_has_its_http_status(server: ScriptedServer, kind: type[ServiceError]) -> None:
    server.handler.rejection = kind("sampling.top_p is wrong", "sampling.top_p")
    error = (response := post(server, json.dumps(BODY))).json()["error"]
    assert (response.status_code, error["param"], error["message"]) == (STATUS[kind].http, "top_p", "top_p is wrong")
    assert ("retry-after" in response.headers) == (response.status_code == 429)


def test_an_error_in_mid_stream_is_an_event(server: ScriptedServer) -> None:
    server.handler.failure = GenerationFailed("a step failed")
    streamed = list(events(post(server, json.dumps({**BODY, "stream": True}))))
    assert streamed[-1]["error"]["message"] == "a step failed"
    server.handler.failure = ZeroDivisionError("secret")
    streamed = list(events(post(server, json.dumps({**BODY, "stream": True}))))
    assert streamed[-1]["error"]["code"] == "internal_error"
    whole = post(server, json.dumps(BODY))
    assert rejection(whole) == (500, "internal_error")
    assert "secret" not in whole.text + str(streamed)


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnected_client_ends_its_generation(server: ScriptedServer, stream: bool) -> None:
    server.call(server.handler.hold.clear)
    body = json.dumps({**BODY, "stream": stream}).encode()
    before = server.handler.started
    with socket.create_connection(server.place, timeout=CALL_SECONDS) as connection:
        connection.sendall(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        wait_until(lambda: server.handler.started > before, "the generation has started")
        assert server.handler.running == 1
    wait_until(lambda: server.handler.running == 0, "the generation has ended")


def test_requests_are_counted_by_path_and_status(server: ScriptedServer) -> None:
    assert observed(server, lambda: post(server, json.dumps(BODY))) == [("/v1/completions", "POST", 200)]
    assert observed(server, lambda: server.client.get("/v1/models/some")) == [("/v1/models/{name:path}", "GET", 404)]
    assert observed(server, lambda: server.client.put("/secret/path")) == [("other", "PUT", 404)]


def test_a_draining_server_finishes_running_requests_and_closes_others(tiny_model: Callable[[str], Path]) -> None:
    with closing(ScriptedServer(tiny_model("llama"))) as one:
        one.call(one.handler.hold.clear)
        body = {**BODY, "stream": True}
        with (
            httpx.Client(base_url=one.url, timeout=CALL_SECONDS) as other,
            httpx.stream("POST", f"{one.url}/v1/completions", json=body, timeout=CALL_SECONDS) as response,
        ):
            chunks = events(response)
            next(chunks)
            one.call(one.readiness.retire)
            ready = other.get("/ready")
            assert (rejection(ready), ready.headers["connection"]) == ((503, "unavailable"), "close")
            one.call(one.handler.hold.set)
            assert list(chunks)
        one.run(one.server.finish_requests())
