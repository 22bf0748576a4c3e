"""What clients may send on a connection, byte by byte: offers to upgrade, pipelined requests, a closed side."""

import json
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from tests.faults import wait_until
from tests.running_quire import CALL_SECONDS, RunningQuire
from tests.services.gateway.http.responses import read_all
from tests.services.gateway.http.scripted_server import ScriptedServer

UPGRADE = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
LAST = b"connection: close\r\n"
PROBE = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.fixture(scope="module")
def scripted(tiny_model: Callable[[str], Path]) -> Iterator[ScriptedServer]:
    with closing(ScriptedServer(tiny_model("llama"))) as server:
        yield server


@pytest.fixture
def server(scripted: ScriptedServer) -> Iterator[ScriptedServer]:
    yield scripted
    scripted.call(scripted.handler.hold.set)
    scripted.settle()
    assert scripted.handler.running == 0


def post(prompt: str = "x", headers: bytes = b"", **fields: object) -> bytes:
    body = json.dumps({"prompt": prompt, "max_tokens": 2, **fields}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n"
    return head % (headers, len(body)) + body


def get(path: bytes = b"/health", headers: bytes = b"") -> bytes:
    return b"GET %b HTTP/1.1\r\nhost: x\r\n%b\r\n" % (path, headers)


def connect(server: ScriptedServer) -> socket.socket:
    return socket.create_connection(server.place, timeout=CALL_SECONDS)


def exchange(server: ScriptedServer, *parts: bytes) -> bytes:
    """Send parts, one segment each, and return all bytes until the server closes."""
    with connect(server) as connection:
        for part in parts:
            connection.sendall(part)
            server.turns()
        return read_all(connection)


def statuses(answer: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


def texts(answer: bytes) -> list[str]:
    bodies = [part.partition(b"\r\n\r\n")[2] for part in answer.split(b"HTTP/1.1 ")[1:]]
    return [json.loads(body)["choices"][0]["text"] for body in bodies if b"choices" in body]


# Offers to upgrade.


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
def test_an_offer_to_upgrade_is_ignored(server: ScriptedServer, size: int) -> None:
    sent = post("first", UPGRADE) + post("second" * 500, b"connection: upgrade\r\nupgrade: websocket\r\n")
    sent += post("third", b"connection: close, Upgrade\r\nupgrade: h2c\r\n")
    with connect(server) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, len(sent), size):
            connection.sendall(sent[at : at + size])
        answer = read_all(connection)
    assert statuses(answer) == [200] * 3
    assert texts(answer) == ["first" * 2, "second" * 1000, "third" * 2]


def test_a_gateway_answers_clients_that_offer_to_upgrade(tiny_quire: RunningQuire) -> None:
    host, port = tiny_quire.http_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=CALL_SECONDS) as connection:
        connection.sendall(post("a b c", UPGRADE) + get(headers=UPGRADE) + post("a b c", LAST))
        answer = read_all(connection)
    assert statuses(answer) == [200] * 3
    first, second = texts(answer)
    assert len(first) > 0
    assert len(second) > 0


def test_many_offers_to_upgrade_at_once_are_answered(server: ScriptedServer) -> None:
    assert statuses(exchange(server, get(headers=UPGRADE) * 500 + get(headers=LAST))) == [200] * 501


def test_connect_is_no_offer(server: ScriptedServer) -> None:
    answer = exchange(server, b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\nrest")
    assert statuses(answer) == [400]


# Pipelined requests.


@pytest.mark.parametrize("count", [1, 8, 20, 300])
def test_pipelined_requests_are_answered_however_many(server: ScriptedServer, count: int) -> None:
    answer = exchange(server, b"".join(post(f"{at};") for at in range(count)) + post("last", LAST))
    assert texts(answer) == [f"{at};" * 2 for at in range(count)] + ["last" * 2]


def test_few_requests_are_parsed_while_one_is_answered(server: ScriptedServer) -> None:
    server.call(server.handler.hold.clear)
    with connect(server) as connection:
        connection.sendall(post() + get() * 3000 + get(headers=LAST))
        wait_until(lambda: server.handler.running == 1, "a request to run")
        server.turns()
        assert 8 <= server.waiting() < 64
        server.call(server.handler.hold.set)
        assert statuses(read_all(connection)) == [200] * 3002


@pytest.mark.parametrize(
    ("fault", "status"),
    [
        (b"garbage\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 200 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\na: " + b"b" * 40_000 + b"\r\n\r\n", 431),
        (b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nnonsense\r\n", 400),
    ],
    ids=["garbage", "headers", "head", "body"],
)
@pytest.mark.parametrize("count", [0, 1, 3, 20])
def test_requests_before_a_fault_are_answered_first(
    server: ScriptedServer, fault: bytes, status: int, count: int
) -> None:
    answer = exchange(server, b"".join(post(f"{at};") for at in range(count)) + fault + get() * 3)
    assert texts(answer) == [f"{at};" * 2 for at in range(count)]
    assert statuses(answer) == [200] * count + [status]


def test_a_method_behind_another_request_is_refused_by_name(server: ScriptedServer) -> None:
    answer = exchange(server, get() + b"BREW /pot HTTP/1.1\r\nhost: x\r\n\r\n")
    assert statuses(answer) == [200, 501]
    assert b"there is no method BREW" in answer


def test_a_fault_does_not_end_the_stream_before_it(server: ScriptedServer) -> None:
    server.call(server.handler.hold.clear)
    with connect(server) as connection:
        connection.sendall(post(stream=True))
        wait_until(lambda: server.handler.running == 1, "a request to run")
        connection.sendall(b"garbage\r\n\r\n")
        server.turns()
        server.call(server.handler.hold.set)
        answer = read_all(connection)
    assert b"data: [DONE]" in answer
    assert statuses(answer) == [200, 400]


def test_the_request_in_work_ends_with_its_client_although_others_wait(server: ScriptedServer) -> None:
    server.call(server.handler.hold.clear)
    with connect(server) as connection:
        connection.sendall(post())
        wait_until(lambda: server.handler.running == 1, "a request to run")
        connection.sendall(get() * 2)
        server.turns()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # reset
    wait_until(lambda: server.handler.running == 0, "the request to end")


# A closed side.


def test_a_client_that_has_closed_its_side_gets_its_responses(server: ScriptedServer) -> None:
    server.call(server.handler.hold.clear)
    with connect(server) as connection:
        connection.sendall(post("first") + post("second", stream=True) + get())
        connection.shutdown(socket.SHUT_WR)
        wait_until(lambda: server.handler.running == 1, "a request to run")
        server.turns()
        server.call(server.handler.hold.set)
        answer = read_all(connection)
    assert statuses(answer.replace(PROBE, b"")) == [200] * 3
    assert b"data: [DONE]" in answer


def test_a_gateway_answers_a_client_that_has_closed_its_side(tiny_quire: RunningQuire) -> None:
    host, port = tiny_quire.http_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=CALL_SECONDS) as connection:
        connection.sendall(post("a b c") + get())
        connection.shutdown(socket.SHUT_WR)
        answer = read_all(connection)
    assert statuses(answer.replace(PROBE, b"")) == [200, 200]
    assert len(texts(answer.replace(PROBE, b""))) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_has_closed_both_sides_ends_its_generation(server: ScriptedServer, stream: bool) -> None:
    server.call(server.handler.hold.clear)
    with connect(server) as connection:
        connection.sendall(post(stream=stream, max_tokens=1000))
        wait_until(lambda: server.handler.running == 1, "a request to run")
    if stream:  # its next write shows it
        with suppress(TimeoutError):
            server.call(server.handler.hold.set)
    wait_until(lambda: server.handler.running == 0, "the request to end")


@pytest.mark.parametrize(
    "sent",
    [b"", b"POST /v1/compl", post()[:-3], b"GET /health HTTP/1.0\r\n"],
    ids=["nothing", "half a head", "half a body", "half a head of HTTP/1.0"],
)
def test_a_side_closed_within_a_request_closes_the_connection(server: ScriptedServer, sent: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(sent)
        server.turns()
        connection.shutdown(socket.SHUT_WR)
        assert read_all(connection) == b""


def test_a_request_that_ends_within_its_body_behind_another_is_dropped(server: ScriptedServer) -> None:
    server.call(server.handler.hold.clear)
    with connect(server) as connection:
        connection.sendall(post("first") + post("second")[:-3])
        wait_until(lambda: server.handler.running == 1, "a request to run")
        connection.shutdown(socket.SHUT_WR)
        server.turns()
        server.call(server.handler.hold.set)
        answer = read_all(connection).replace(PROBE, b"")
    assert texts(answer) == ["first" * 2]
