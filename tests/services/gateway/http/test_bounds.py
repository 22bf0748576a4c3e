"""What nobody may do to the HTTP server: each has its status, and no effect on others."""

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

from services.runtime.errors import GenerationFailed, Overloaded, RequestGivenUp, ServiceError
from services.runtime.statuses import STATUS
from services.runtime.transport import CLIENT_MESSAGE_BYTES
from tests.faults import wait_until
from tests.running_quire import CALL_SECONDS
from tests.services.gateway.http.played_handler import CONNECTIONS, HASTY, PlayedServer

JSON = {"content-type": "application/json"}
BODY = {"prompt": "x", "max_tokens": 2}


@pytest.fixture(scope="module")
def played(tiny_model: Callable[[str], Path]) -> Iterator[PlayedServer]:
    one = PlayedServer(tiny_model("llama"))
    yield one
    one.close()


@pytest.fixture(scope="module")
def played_hasty(tiny_model: Callable[[str], Path]) -> Iterator[PlayedServer]:
    one = PlayedServer(tiny_model("llama"), HASTY)
    yield one
    one.close()


@pytest.fixture
def server(played: PlayedServer) -> Iterator[PlayedServer]:
    """One that is patient. Each test leaves the desk empty, and other clients undisturbed."""
    yield from left_as_it_was(played)


@pytest.fixture
def hasty(played_hasty: PlayedServer) -> Iterator[PlayedServer]:
    """One that soon gives up who does not go on."""
    yield from left_as_it_was(played_hasty)


def left_as_it_was(played: PlayedServer) -> Iterator[PlayedServer]:
    yield played
    played.call(played.handler.hold.set)
    played.handler.refusal = played.handler.failure = None
    assert get(played, "/health").status_code == 200
    played.settle()
    assert played.handler.running == 0


def get(server: PlayedServer, path: str, **headers: str) -> httpx.Response:
    return httpx.get(f"{server.url}{path}", headers=headers, timeout=CALL_SECONDS)


def post(server: PlayedServer, content: Any, **headers: str) -> httpx.Response:
    url = f"{server.url}/v1/completions"
    return httpx.post(url, content=content, headers=JSON | headers, timeout=CALL_SECONDS)


def refusal(response: httpx.Response) -> tuple[int, str]:
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return response.status_code, error["code"]


def raw(server: PlayedServer, data: bytes) -> bytes:
    """Send bytes, which the server finds together, and return what comes until it closes."""
    with server.standing_still():
        connection = socket.create_connection(server.place, timeout=CALL_SECONDS)
        connection.setblocking(False)
        sent = connection.send(data)
        connection.settimeout(CALL_SECONDS)
    with connection:
        with suppress(BrokenPipeError, ConnectionResetError):  # it has seen enough, and closed
            connection.sendall(data[sent:])
        return read_all(connection)


def read_all(connection: socket.socket) -> bytes:
    parts = []
    with suppress(ConnectionResetError):  # some of what was sent has not been read
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
def test_a_body_that_is_wrong_is_refused_with_the_reason(server: PlayedServer, content: bytes, reason: str) -> None:
    begun = time.process_time()
    response = post(server, content)
    assert response.status_code == 400
    assert reason in response.json()["error"]["message"]
    assert time.process_time() - begun < 3, "it takes more work than its size is worth"
    assert server.handler.running == 0


def test_brackets_in_texts_are_no_levels(server: PlayedServer) -> None:
    assert post(server, json.dumps({**BODY, "prompt": '[{"' * 100, "stop": ["[{" * 200]})).status_code == 200


def test_a_body_that_is_too_large_is_refused_before_it_is_read(server: PlayedServer, hasty: PlayedServer) -> None:
    large = b'{"prompt": "' + b"x" * 10_000_000 + b'"}'
    assert refusal(post(server, large)) == (413, "body_too_large")
    pieces = (large[at : at + 65536] for at in range(0, len(large), 65536))
    assert refusal(post(server, pieces)) == (413, "body_too_large")
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    assert raw(hasty, head + b"content-length: 99999999999\r\n\r\n").startswith(b"HTTP/1.1 413")
    fits = b'{"max_tokens": 1, "prompt": "' + b"x" * (CLIENT_MESSAGE_BYTES - 40) + b'"}'
    assert post(server, fits).status_code == 200


LARGE = 80 * 1024 * 1024  # more than the buffers of both ends take


def in_pieces(size: int) -> Iterator[bytes]:
    return (b"x" * 65536 for _ in range(size // 65536))


def by_http_client(server: PlayedServer, path: str, body: Any, headers: dict[str, str]) -> tuple[int, bytes]:
    """Send all of a request, and only then read the answer, as Python's own client does."""
    connection = http.client.HTTPConnection(*server.place, timeout=CALL_SECONDS)
    try:
        connection.request("POST", path, body, JSON | headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
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
def test_a_client_that_sends_all_before_it_reads_gets_the_refusal(
    server: PlayedServer, path: str, headers: dict[str, str], status: int, closes: dict[str, str]
) -> None:
    assert by_http_client(server, path, b"x" * LARGE, headers | closes)[0] == status
    assert by_http_client(server, path, in_pieces(LARGE), headers | closes)[0] == status


def test_a_client_of_http_1_0_that_sends_all_before_it_reads_gets_the_refusal(server: PlayedServer) -> None:
    head = b"POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % LARGE
    with socket.create_connection(server.place, timeout=CALL_SECONDS) as connection:
        connection.sendall(head)
        for piece in in_pieces(LARGE):
            connection.sendall(piece)
        assert read_all(connection).startswith(b"HTTP/1.1 413")


def test_a_client_that_asks_before_it_sends_is_told_and_the_connection_is_closed(server: PlayedServer) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nexpect: 100-continue\r\n"
    answer = raw(server, head + b"content-length: 99999999\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"\r\nconnection: close\r\n" in answer
    assert answer.count(b"HTTP/1.1") == 1


def test_the_rest_of_a_refused_request_has_a_bound_in_bytes(
    server: PlayedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.runtime.http.connection._MAX_UNREAD_BYTES", 1024 * 1024)
    for headers in ({}, {"connection": "close"}, {"a b": "c"}):
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            by_http_client(server, "/v1/completions", b"x" * LARGE, headers)


@pytest.mark.parametrize("closes", [b"", b"connection: close\r\n"], ids=["kept alive", "closing"])
def test_the_rest_of_a_refused_request_has_a_bound_in_time(hasty: PlayedServer, closes: bytes) -> None:
    head = b"POST /nothing HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n" + closes
    with socket.create_connection(hasty.place, timeout=CALL_SECONDS) as connection:
        connection.sendall(head + b"\r\n")
        answer = connection.recv(65536)
        hasty.settle()  # nobody is connected: it has not waited for the client to close
        assert (answer + read_all(connection)).count(b"HTTP/1.1 ") == 1, "there is one answer to one request"


def test_what_is_not_plain_json_is_not_unpacked(server: PlayedServer) -> None:
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
def test_a_head_that_is_too_large_is_refused(server: PlayedServer, head: bytes) -> None:
    with socket.create_connection(server.place, timeout=CALL_SECONDS) as connection:
        for at in range(0, len(head), 20_000):
            try:
                connection.sendall(head[at : at + 20_000])
            except (BrokenPipeError, ConnectionResetError):
                return  # it was closed while we were still sending
            time.sleep(0.001)
        answer = read_all(connection)
    assert not answer or answer.startswith(b"HTTP/1.1 431")  # a reset may come before it


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
def test_what_is_no_http_is_refused(server: PlayedServer, data: bytes) -> None:
    assert raw(server, data).startswith(b"HTTP/1.1 400 Bad Request\r\n")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"GET /health HT",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n{",
        b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nPOST /v1/completions HTTP/1.1\r\ncontent-length: 50\r\n\r\n{",
    ],
    ids=["nothing", "half a head", "half a body", "half a body behind another request"],
)
def test_a_request_that_does_not_come_to_its_end_is_given_up(hasty: PlayedServer, data: bytes) -> None:
    begun = time.monotonic()
    answer = raw(hasty, data)
    assert HASTY.read_seconds * 0.9 < time.monotonic() - begun < 45  # a connection is kept for 75 s
    assert b"HTTP/1.1 408 Request Timeout" in answer or answer.startswith(b"HTTP/1.1 200")


def test_blank_lines_do_not_keep_a_connection_open(hasty: PlayedServer) -> None:
    with hasty.standing_still():
        connection = socket.create_connection(hasty.place, timeout=CALL_SECONDS)
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    with connection:
        answer = connection.recv(65536)
        connection.sendall(b"\r\n")
        answer += read_all(connection)
    assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"408"]


def test_a_request_that_comes_drop_by_drop_is_given_up_too(hasty: PlayedServer) -> None:
    with socket.create_connection(hasty.place, timeout=CALL_SECONDS) as connection:
        try:
            for byte in b"GET /health HTTP/1.1\r\nhost: xxxxxxxxxxxxxxxxxxxxxxxx\r\n\r\n":
                connection.sendall(bytes([byte]))
                time.sleep(0.03)
        except (BrokenPipeError, ConnectionResetError):
            return
        answer = read_all(connection)
    assert not answer or answer.startswith(b"HTTP/1.1 408")


def crowd(server: PlayedServer) -> list[socket.socket]:
    """Connect two more than it takes, before it sees the first of them."""
    with server.standing_still():
        return [socket.create_connection(server.place, timeout=CALL_SECONDS) for _ in range(CONNECTIONS + 2)]


def test_too_many_connections_are_refused_and_those_that_are_there_go_on(server: PlayedServer) -> None:
    with httpx.Client(base_url=server.url, timeout=CALL_SECONDS) as client:
        assert client.get("/health").status_code == 200
        others = crowd(server)
        # The client has a place as well.
        told = [read_all(one) for one in others[CONNECTIONS - 1 :]]
        assert [b"HTTP/1.1 503" in one and b"\r\nretry-after: 1\r\n" in one for one in told] == [True] * 3
        assert client.get("/health").status_code == 200
        for one in others:
            one.close()


def test_a_client_that_does_not_read_is_cut_off(hasty: PlayedServer) -> None:
    body = json.dumps({"prompt": "x" * 10_000, "max_tokens": 1000, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    before, begun = hasty.handler.begun, time.monotonic()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with hasty.standing_still():
            connection.connect(hasty.place)
            connection.sendall(head.encode() + body)
        wait_until(lambda: hasty.handler.begun > before, "the generation has begun")
        wait_until(lambda: hasty.handler.running == 0, "it has ended: 10 MB are more than any buffer takes")
    assert time.monotonic() - begun > HASTY.write_seconds * 0.9


def test_header_values_are_never_written_back(server: PlayedServer) -> None:
    answer = raw(server, b"GET /health HTTP/1.1\r\nhost: x\r\nx-request-id: a\r\n b: c\r\nconnection: close\r\n\r\n")
    assert b"b: c" not in answer
    assert refusal(post(server, json.dumps({**BODY, "request_id": "a\nb"})))[0] == 400


def test_health_says_whether_it_can_generate_and_live_that_it_is_there(server: PlayedServer) -> None:
    server.call(lambda: server.readiness.set(False))
    try:
        away = {path: get(server, path) for path in ("/health", "/ready", "/live")}
    finally:
        server.call(lambda: server.readiness.set(True))
    assert [refusal(away[path]) for path in ("/health", "/ready")] == [(503, "unavailable")] * 2
    assert away["/live"].json() == {"status": "alive"}
    assert [get(server, path).status_code for path in away] == [200] * 3


def test_unknown_paths_and_methods_are_answered_in_openais_shape(server: PlayedServer) -> None:
    assert refusal(get(server, "/v1/nothing")) == (404, "not_found")
    wrong = get(server, "/v1/completions")
    assert (refusal(wrong), wrong.headers["allow"]) == ((405, "method_not_allowed"), "POST")
    assert refusal(get(server, "/v1/models/../../etc/passwd")) == (404, "not_found")
    assert refusal(get(server, "/v1/models/%2e%2e%2fetc%2fpasswd")) == (404, "model_not_found")


def test_pipelined_requests_are_answered_in_order(server: PlayedServer) -> None:
    one = b"GET /%b HTTP/1.1\r\nhost: x\r\n\r\n"
    last = b"GET /version HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    answer = raw(server, one % b"health" + one % b"nothing" + last)
    assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"404", b"200"]
    assert raw(server, one % b"health" * 100).count(b"HTTP/1.1 200") < 100, "it would queue any number"


# Errors of the gateway


def test_a_key_that_is_wrong_is_refused_before_the_body_is_read(server: PlayedServer) -> None:
    response = post(server, b"{", authorization="Bearer wrong")
    assert refusal(response) == (401, "invalid_api_key")
    assert response.headers["www-authenticate"] == "Bearer"
    post(server, json.dumps(BODY), authorization="Bearer good")
    assert server.handler.callers[-1].tenant == "theirs"
    assert get(server, "/health", authorization="Bearer wrong").status_code == 200


def test_a_full_queue_says_when_to_come_again(server: PlayedServer) -> None:
    server.handler.refusal = Overloaded("the queue is full", retry_seconds=2.5)
    response = post(server, json.dumps(BODY))
    assert refusal(response) == (429, "overloaded")
    assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("3", "2500")
    assert post(server, json.dumps({**BODY, "stream": True})).status_code == 429


def test_clients_find_no_metrics_where_they_send_requests(server: PlayedServer) -> None:
    assert get(server, "/metrics", authorization="Bearer good").status_code == 404


def test_a_request_that_is_given_up_is_not_repeated_by_openais_clients(server: PlayedServer) -> None:
    server.handler.refusal = RequestGivenUp("3 engines were lost")
    response = post(server, json.dumps(BODY))
    assert refusal(response) == (500, "request_given_up")
    assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("kind", ServiceError.__subclasses__(), ids=lambda kind: kind.__name__)
def test_every_refusal_has_the_status_of_the_table(server: PlayedServer, kind: type[ServiceError]) -> None:
    server.handler.refusal = kind("sampling.top_p is wrong", "sampling.top_p")
    error = (response := post(server, json.dumps(BODY))).json()["error"]
    assert (response.status_code, error["param"], error["message"]) == (STATUS[kind].http, "top_p", "top_p is wrong")
    assert ("retry-after" in response.headers) == (response.status_code == 429)


def test_an_error_in_mid_stream_is_an_event(server: PlayedServer) -> None:
    server.handler.failure = GenerationFailed("the engine could not go on")
    lines = post(server, json.dumps({**BODY, "stream": True})).text.strip().split("\n\n")
    assert json.loads(lines[-2].removeprefix("data: "))["error"]["message"] == "the engine could not go on"
    assert lines[-1] == "data: [DONE]"
    server.handler.failure = ZeroDivisionError("secret")
    lines = post(server, json.dumps({**BODY, "stream": True})).text.strip().split("\n\n")
    assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "internal_error"
    whole = post(server, json.dumps(BODY))
    assert refusal(whole) == (500, "internal_error")
    assert "secret" not in whole.text + lines[-2]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_generation(server: PlayedServer, stream: bool) -> None:
    server.call(server.handler.hold.clear)
    body = json.dumps({**BODY, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    before = server.handler.begun
    with socket.create_connection(server.place, timeout=CALL_SECONDS) as connection:
        connection.sendall(head.encode() + body)
        wait_until(lambda: server.handler.begun > before, "the generation has begun")
        assert server.handler.running == 1
    wait_until(lambda: server.handler.running == 0, "the generation has ended")


def test_requests_are_counted_by_path_and_status(server: PlayedServer) -> None:
    assert heard(server, lambda: post(server, json.dumps(BODY))) == [("/v1/completions", "POST", 200)]
    assert heard(server, lambda: get(server, "/v1/models/some")) == [("/v1/models/{name:path}", "GET", 404)]
    secret = f"{server.url}/secret/path"
    assert heard(server, lambda: httpx.put(secret, timeout=CALL_SECONDS)) == [("other", "PUT", 404)]


def test_a_draining_server_finishes_what_runs_and_sends_others_away(tiny_model: Callable[[str], Path]) -> None:
    one = PlayedServer(tiny_model("llama"))
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


# What is refused below the application, and counted all the same


def heard(server: PlayedServer, refuse: Callable[[], object]) -> list[tuple[str, str, int]]:
    """Return what the observer hears of what `refuse` does."""
    server.settle()  # it hears of an answer when that has been sent
    before = len(server.observer.requests)
    refuse()
    server.settle()
    return server.observer.requests[before:]


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: x\r\n" + b"a: " + b"x" * 40_000 + b"\r\n\r\n", 431),
        (b"GET /health HT", 408),
    ],
    ids=["no HTTP", "large head", "half a head"],
)
def test_a_refusal_before_the_path_is_known_is_counted(hasty: PlayedServer, data: bytes, status: int) -> None:
    assert heard(hasty, lambda: raw(hasty, data)) == [("other", "other", status)]


def test_a_body_that_does_not_come_is_counted_once_and_under_its_path(hasty: PlayedServer) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n{"
    assert heard(hasty, lambda: raw(hasty, head)) == [("/v1/completions", "POST", 408)]


def test_each_connection_too_many_is_counted(server: PlayedServer) -> None:
    def come_and_go() -> None:
        others = crowd(server)
        for one in others[CONNECTIONS:]:
            assert b"HTTP/1.1 503" in read_all(one)
        for one in others:
            one.close()

    assert heard(server, come_and_go) == [("other", "other", 503)] * 2
