"""Malformed, oversized and slow requests: each gets its status and does not affect other clients."""

import gzip
import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.runtime.errors import GenerationFailed, Overloaded, RepeatedEngineLoss, ServiceError
from services.runtime.statuses import STATUS
from services.runtime.transport import CLIENT_MESSAGE_BYTES
from tests.faults import wait_until
from tests.running_quire import CALL_SECONDS
from tests.services.gateway.http.scripted_server import CONNECTIONS, SHORT_LIMITS, ScriptedServer

JSON = {"content-type": "application/json"}
BODY = {"prompt": "x", "max_tokens": 2}


@pytest.fixture(scope="module")
def patient_server(tiny_model: Callable[[str], Path]) -> Iterator[ScriptedServer]:
    one = ScriptedServer(tiny_model("llama"))
    yield one
    one.close()


@pytest.fixture(scope="module")
def impatient_server(tiny_model: Callable[[str], Path]) -> Iterator[ScriptedServer]:
    one = ScriptedServer(tiny_model("llama"), SHORT_LIMITS)
    yield one
    one.close()


@pytest.fixture
def server(patient_server: ScriptedServer) -> Iterator[ScriptedServer]:
    """A server with long limits."""
    yield from unchanged(patient_server)


@pytest.fixture
def impatient(impatient_server: ScriptedServer) -> Iterator[ScriptedServer]:
    """A server with short limits."""
    yield from unchanged(impatient_server)


def unchanged(server: ScriptedServer) -> Iterator[ScriptedServer]:
    """Check after a test that no request runs and that other clients are served."""
    yield server
    server.call(server.handler.hold.set)
    server.handler.refusal = server.handler.failure = None
    assert get(server, "/health").status_code == 200
    server.settle()
    assert server.handler.running == 0


def get(server: ScriptedServer, path: str, **headers: str) -> httpx.Response:
    return httpx.get(f"{server.url}{path}", headers=headers, timeout=CALL_SECONDS)


def post(server: ScriptedServer, content: Any, **headers: str) -> httpx.Response:
    url = f"{server.url}/v1/completions"
    return httpx.post(url, content=content, headers=JSON | headers, timeout=CALL_SECONDS)


def refusal(response: httpx.Response) -> tuple[int, str]:
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return response.status_code, error["code"]


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


def read_all(connection: socket.socket) -> bytes:
    parts = []
    with suppress(ConnectionResetError):  # closed before all was read
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


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
        (b'{"seed": ' + b"9" * 5000 + b"}", "number that cannot be parsed"),
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
    large = b'{"prompt": "' + b"x" * 10_000_000 + b'"}'
    assert refusal(post(server, large)) == (413, "body_too_large")
    pieces = (large[at : at + 65536] for at in range(0, len(large), 65536))
    assert refusal(post(server, pieces)) == (413, "body_too_large")
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    assert raw(impatient, head + b"content-length: 99999999999\r\n\r\n").startswith(b"HTTP/1.1 413")
    fits = b'{"max_tokens": 1, "prompt": "' + b"x" * (CLIENT_MESSAGE_BYTES - 40) + b'"}'
    assert post(server, fits).status_code == 200


LARGE = 80 * 1024 * 1024  # larger than the buffers of both ends


def in_pieces(size: int) -> Iterator[bytes]:
    return (b"x" * 65536 for _ in range(size // 65536))


def by_http_client(server: ScriptedServer, path: str, body: Any, headers: dict[str, str]) -> tuple[int, bytes]:
    """Send the complete request before reading the response, as Python's http.client does."""
    connection = http.client.HTTPConnection(*server.place, timeout=CALL_SECONDS)
    try:
        connection.request("POST", path, body, JSON | headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


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
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nexpect: 100-continue\r\n"
    answer = raw(server, head + b"content-length: 99999999\r\n\r\n")
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
    bomb = gzip.compress(b'{"prompt": "' + b"x" * 100_000_000 + b'"}', 1)
    assert refusal(post(server, bomb, **{"content-encoding": "gzip"})) == (415, "encoded_body")
    assert refusal(post(server, b"prompt=x", **{"content-type": "text/plain"})) == (415, "unsupported_media_type")


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
    with socket.create_connection(server.place, timeout=CALL_SECONDS) as connection:
        for at in range(0, len(head), 20_000):
            try:
                connection.sendall(head[at : at + 20_000])
            except (BrokenPipeError, ConnectionResetError):
                return  # closed before all was sent
        answer = read_all(connection)
    assert not answer or answer.startswith(b"HTTP/1.1 431")  # a reset can overtake it


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
    ],
    ids=["TLS", "HTTP/2", "half a line", "two lengths", "blank in a name", "negative length", "CONNECT"],
)
def test_malformed_http_is_rejected(server: ScriptedServer, data: bytes) -> None:
    assert raw(server, data).startswith(b"HTTP/1.1 400 Bad Request\r\n")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET /health HT",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n{",
        b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nPOST /v1/completions HTTP/1.1\r\ncontent-length: 50\r\n\r\n{",
    ],
    ids=["nothing", "half a head", "half a body", "half a body after another request"],
)
def test_an_incomplete_request_times_out(impatient: ScriptedServer, data: bytes) -> None:
    started = time.monotonic()
    answer = raw(impatient, data)
    assert SHORT_LIMITS.read_seconds * 0.9 < time.monotonic() - started < 45  # idle connections are kept for 75 s
    assert b"HTTP/1.1 408 Request Timeout" in answer or answer.startswith(b"HTTP/1.1 200")


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
        try:
            for byte in b"GET /health HTTP/1.1\r\nhost: xxxxxxxxxxxxxxxxxxxxxxxx\r\n\r\n":
                connection.sendall(bytes([byte]))
                time.sleep(0.03)
        except (BrokenPipeError, ConnectionResetError):
            return
        answer = read_all(connection)
    assert not answer or answer.startswith(b"HTTP/1.1 408")


def crowd(server: ScriptedServer) -> list[socket.socket]:
    """Open two connections more than the limit, before the server accepts the first of them."""
    with server.blocked():
        return [socket.create_connection(server.place, timeout=CALL_SECONDS) for _ in range(CONNECTIONS + 2)]


def test_connections_above_the_limit_are_rejected_and_open_ones_are_served(server: ScriptedServer) -> None:
    with httpx.Client(base_url=server.url, timeout=CALL_SECONDS) as client:
        assert client.get("/health").status_code == 200
        others = crowd(server)
        # The client's own connection counts, too.
        rejected = [read_all(one) for one in others[CONNECTIONS - 1 :]]
        assert [b"HTTP/1.1 503" in one and b"\r\nretry-after: 1\r\n" in one for one in rejected] == [True] * 3
        assert client.get("/health").status_code == 200
        for one in others:
            one.close()


def test_a_client_that_does_not_read_is_disconnected(impatient: ScriptedServer) -> None:
    body = json.dumps({"prompt": "x" * 10_000, "max_tokens": 1000, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    before, started = impatient.handler.started, time.monotonic()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with impatient.blocked():
            connection.connect(impatient.place)
            connection.sendall(head.encode() + body)
        wait_until(lambda: impatient.handler.started > before, "the generation has started")
        wait_until(lambda: impatient.handler.running == 0, "it has ended, because 10 MB fill all buffers")
    assert time.monotonic() - started > SHORT_LIMITS.write_seconds * 0.9


@pytest.mark.parametrize(
    "name",
    [b"a\nset-cookie: evil=1", b"a\rset-cookie: evil=1", b"a\r\n set-cookie: evil=1", b"a\x00evil", b"a evil", b"\xff"],
    ids=["LF", "CR", "folded", "NUL", "space", "not ASCII"],
)
def test_a_request_id_adds_no_header_to_the_response(server: ScriptedServer, name: bytes) -> None:
    content = json.dumps(BODY).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    rest = b"x-request-id: %b\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % (name, len(content))
    answer = raw(server, head + rest + content)
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 200 "))
    assert b"\r\nset-cookie" not in answer
    assert b"evil" not in answer


@pytest.mark.parametrize("name", ["a\r\nset-cookie: evil=1", "a\nb", "\u010d\u010aset-cookie:evil", "a" * 101, ""])
def test_an_invalid_request_id_in_the_body_is_rejected(server: ScriptedServer, name: str) -> None:
    response = post(server, json.dumps({**BODY, "request_id": name}))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "request_id")
    assert not {"set-cookie", "x-request-id"} & set(response.headers)


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
        responses = {path: get(server, path) for path in ("/health", "/ready", "/live")}
    finally:
        server.call(lambda: server.readiness.set(True))
    assert [refusal(responses[path]) for path in ("/health", "/ready")] == [(503, "unavailable")] * 2
    assert responses["/live"].json() == {"status": "alive"}
    assert [get(server, path).status_code for path in responses] == [200] * 3


def test_unknown_paths_and_methods_get_errors_in_openais_format(server: ScriptedServer) -> None:
    assert refusal(get(server, "/v1/nothing")) == (404, "not_found")
    wrong = get(server, "/v1/completions")
    assert (refusal(wrong), wrong.headers["allow"]) == ((405, "method_not_allowed"), "POST")
    assert refusal(get(server, "/v1/models/%2e%2e%2fetc%2fpasswd")) == (404, "model_not_found")


def test_pipelined_requests_are_answered_in_order(server: ScriptedServer) -> None:
    one = b"GET /%b HTTP/1.1\r\nhost: x\r\n\r\n"
    last = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    answer = raw(server, one % b"health" + one % b"nothing" + last)
    assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"404", b"200"]
    assert raw(server, one % b"health" * 100).count(b"HTTP/1.1 200") < 100, "pipelined requests have no limit"


# Errors of the request handler


def test_an_invalid_api_key_is_rejected_before_the_body_is_read(server: ScriptedServer) -> None:
    response = post(server, b"{", authorization="Bearer wrong")
    assert refusal(response) == (401, "invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"
    post(server, json.dumps(BODY), authorization="Bearer good")
    assert server.handler.callers[-1].tenant == "theirs"
    assert get(server, "/health", authorization="Bearer wrong").status_code == 200


def test_a_full_queue_sends_retry_after(server: ScriptedServer) -> None:
    server.handler.refusal = Overloaded("the queue is full", retry_seconds=2.5)
    response = post(server, json.dumps(BODY))
    assert refusal(response) == (429, "overloaded")
    assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("3", "2500")
    assert post(server, json.dumps({**BODY, "stream": True})).status_code == 429


def test_the_api_port_serves_no_metrics(server: ScriptedServer) -> None:
    assert get(server, "/metrics", authorization="Bearer good").status_code == 404


def test_a_request_lost_with_several_engines_is_not_to_be_retried(server: ScriptedServer) -> None:
    server.handler.refusal = RepeatedEngineLoss("3 engines were lost")
    response = post(server, json.dumps(BODY))
    assert refusal(response) == (500, "request_given_up")
    assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("kind", ServiceError.__subclasses__(), ids=lambda kind: kind.__name__)
def test_every_service_error_has_its_http_status(server: ScriptedServer, kind: type[ServiceError]) -> None:
    server.handler.refusal = kind("sampling.top_p is wrong", "sampling.top_p")
    error = (response := post(server, json.dumps(BODY))).json()["error"]
    assert (response.status_code, error["param"], error["message"]) == (STATUS[kind].http, "top_p", "top_p is wrong")
    assert ("retry-after" in response.headers) == (response.status_code == 429)


def test_an_error_in_mid_stream_is_an_event(server: ScriptedServer) -> None:
    server.handler.failure = GenerationFailed("a step failed")
    lines = post(server, json.dumps({**BODY, "stream": True})).text.strip().split("\n\n")
    assert json.loads(lines[-2].removeprefix("data: "))["error"]["message"] == "a step failed"
    assert lines[-1] == "data: [DONE]"
    server.handler.failure = ZeroDivisionError("secret")
    lines = post(server, json.dumps({**BODY, "stream": True})).text.strip().split("\n\n")
    assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "internal_error"
    whole = post(server, json.dumps(BODY))
    assert refusal(whole) == (500, "internal_error")
    assert "secret" not in whole.text + lines[-2]


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnected_client_ends_its_generation(server: ScriptedServer, stream: bool) -> None:
    server.call(server.handler.hold.clear)
    body = json.dumps({**BODY, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    before = server.handler.started
    with socket.create_connection(server.place, timeout=CALL_SECONDS) as connection:
        connection.sendall(head.encode() + body)
        wait_until(lambda: server.handler.started > before, "the generation has started")
        assert server.handler.running == 1
    wait_until(lambda: server.handler.running == 0, "the generation has ended")


def test_requests_are_counted_by_path_and_status(server: ScriptedServer) -> None:
    assert observed(server, lambda: post(server, json.dumps(BODY))) == [("/v1/completions", "POST", 200)]
    assert observed(server, lambda: get(server, "/v1/models/some")) == [("/v1/models/{name:path}", "GET", 404)]
    secret = f"{server.url}/secret/path"
    assert observed(server, lambda: httpx.put(secret, timeout=CALL_SECONDS)) == [("other", "PUT", 404)]


def test_a_draining_server_finishes_running_requests_and_closes_others(
    tiny_model: Callable[[str], Path],
) -> None:
    one = ScriptedServer(tiny_model("llama"))
    try:
        one.call(one.handler.hold.clear)
        body = {**BODY, "stream": True}
        with (
            httpx.Client(base_url=one.url, timeout=CALL_SECONDS) as other,
            httpx.stream("POST", f"{one.url}/v1/completions", json=body, timeout=CALL_SECONDS) as response,
        ):
            lines = response.iter_lines()
            next(lines)
            one.call(one.readiness.retire)
            ready = other.get("/ready")
            assert (refusal(ready), ready.headers["connection"]) == ((503, "unavailable"), "close")
            one.call(one.handler.hold.set)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        one.run(one.server.finish_requests())
    finally:
        one.close()


# Requests rejected below the application


def observed(server: ScriptedServer, send: Callable[[], object]) -> list[tuple[str, str, int]]:
    """Return the requests that the observer receives for those of `send`."""
    server.settle()  # a request is observed after its response was sent
    before = len(server.observer.requests)
    send()
    server.settle()
    return server.observer.requests[before:]


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a: " + b"x" * 40_000 + b"\r\n\r\n", 431),
        (b"GET /health HT", 408),
    ],
    ids=["malformed", "large headers", "half a head"],
)
def test_a_request_rejected_without_a_path_is_counted(impatient: ScriptedServer, data: bytes, status: int) -> None:
    assert observed(impatient, lambda: raw(impatient, data)) == [("other", "other", status)]


def test_an_incomplete_body_is_counted_once_under_its_path(impatient: ScriptedServer) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n{"
    assert observed(impatient, lambda: raw(impatient, head)) == [("/v1/completions", "POST", 408)]


def test_each_connection_above_the_limit_is_counted(server: ScriptedServer) -> None:
    def connect_and_close() -> None:
        others = crowd(server)
        for one in others[CONNECTIONS:]:
            assert b"HTTP/1.1 503" in read_all(one)
        for one in others:
            one.close()

    assert observed(server, connect_and_close) == [("other", "other", 503)] * 2
