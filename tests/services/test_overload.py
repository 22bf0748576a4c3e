"""More than a running Quire can take: who is refused and told what, whose deadline passes, and who does not read."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from google.rpc import error_details_pb2, status_pb2

from quire.v1 import gateway_pb2, gateway_pb2_grpc
from tests.load import prompt_request
from tests.running_quire import CALL_SECONDS, RunningQuire, start_quire
from tests.scrape import Scrape

SEQUENCES, MAX_REQUESTS = 2, 5
LONG = 1900
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def quire(tiny_model: Callable[[str], Path]) -> Iterator[RunningQuire]:
    """One that runs two sequences at a time, and takes five requests."""
    one = start_quire(
        *("--model", str(tiny_model("llama")), "--device-blocks", "512", "--max-sequences", str(SEQUENCES)),
        *("--max-requests", str(MAX_REQUESTS), "--max-queued-tokens", "4500"),
        *("--slow-client-seconds", "1", "--max-buffered-tokens", "256", "--http-listen", "127.0.0.1:0"),
    )
    yield one
    assert one.settled_pool().sequences == 0
    assert one.close() == 0


@contextmanager
def running(quire: RunningQuire, count: int = SEQUENCES) -> Iterator[list[Any]]:
    """Keep so many long requests running meanwhile."""
    calls = [quire.gateway.Generate(prompt_request(f"{n}", LONG), timeout=CALL_SECONDS) for n in range(count)]
    try:
        for call in calls:
            next(call)
        yield calls
    finally:
        for call in calls:
            call.cancel()
        quire.settled_pool()


def failure(call: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    return caught.value


def shown(quire: RunningQuire) -> Scrape:
    return Scrape.of(quire.metrics_urls["gateway"])


# Refused


def test_a_request_too_many_is_refused_at_once_and_told_when_to_come_again(quire: RunningQuire) -> None:
    with running(quire) as calls:
        waiting = [
            quire.gateway.Generate(prompt_request(f"w{n}", 5), timeout=CALL_SECONDS)
            for n in range(MAX_REQUESTS - SEQUENCES)
        ]
        quire.gateway.GetModel(gateway_pb2.GetModelRequest())  # when it is answered, they have been taken
        begun = time.monotonic()
        error: Any = failure(quire.gateway.Generate(prompt_request("one more", 5), timeout=CALL_SECONDS))
        assert time.monotonic() - begun < 0.5
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.details().startswith("5 requests are under way, the limit is 5; there is room again in about ")
        retry_seconds = told_to_wait(error)
        assert retry_seconds > 0
        for call in [*calls, *waiting]:
            call.cancel()
    quire.generate(prompt_request("again", 5))


def told_to_wait(error: Any) -> float:
    """Read Google's RetryInfo as Google's own messages do, and the wait that gRPC's retries read."""
    metadata = dict(error.trailing_metadata())
    status = status_pb2.Status.FromString(metadata["grpc-status-details-bin"])
    assert (status.code, status.message) == (grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], error.details())
    retry = error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(retry)
    seconds = retry.retry_delay.ToTimedelta().total_seconds()
    assert float(metadata["grpc-retry-pushback-ms"]) == pytest.approx(1000 * seconds, abs=1)
    return seconds


def test_tokens_that_wait_are_bounded_and_those_of_running_requests_do_not_count(quire: RunningQuire) -> None:
    before = shown(quire).values("quire_admission_rejections_total", "reason").get("max_queued_tokens", 0)
    with running(quire):
        waiting = [quire.gateway.Generate(prompt_request(f"w{n}", LONG), timeout=CALL_SECONDS) for n in range(2)]
        quire.gateway.GetModel(gateway_pb2.GetModelRequest())
        error: Any = failure(quire.gateway.Generate(prompt_request("too much", LONG), timeout=CALL_SECONDS))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "tokens wait, the limit is 4500" in error.details()
        assert told_to_wait(error) > 0
        for call in waiting:
            call.cancel()
            assert call.code() == grpc.StatusCode.CANCELLED
    assert shown(quire).value("quire_admission_rejections_total", reason="max_queued_tokens") == before + 1


# Deadlines


@pytest.mark.parametrize("by_call", [False, True], ids=["timeout", "deadline of the call"])
@pytest.mark.parametrize("phase", ["queued", "running"])
def test_a_deadline_that_passes_is_counted_by_whether_the_request_waited_or_ran(
    quire: RunningQuire, phase: str, by_call: bool
) -> None:
    with running(quire, SEQUENCES if phase == "queued" else 0):
        before = deadlines(quire)
        request = prompt_request("late", LONG)
        if not by_call:
            request.timeout.FromTimedelta(timedelta(seconds=0.3))
        error: Any = failure(quire.gateway.Generate(request, timeout=0.3 if by_call else CALL_SECONDS))
        assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        if not by_call:
            said = "waited in the queue" if phase == "queued" else "ran"
            assert error.details() == f"timeout has passed while the request {said}"
        until(lambda: sum(deadlines(quire).values()) > sum(before.values()))
        assert {name: count - before[name] for name, count in deadlines(quire).items()} == {
            "queued": int(phase == "queued"),
            "running": int(phase == "running"),
        }


def deadlines(quire: RunningQuire) -> dict[str, float]:
    return {"queued": 0.0, "running": 0.0} | shown(quire).values("quire_deadline_exceeded_total", "phase")


# Clients that leave


def test_the_blocks_of_a_client_that_left_are_free_after_a_step_and_the_time_is_shown(quire: RunningQuire) -> None:
    with running(quire, 1) as calls:
        before = shown(quire)
        calls[0].cancel()
        pool = quire.settled_pool()
        assert pool.device.held == 0
    after = shown(quire)
    ended = [now.value("quire_cancel_to_free_seconds_count") if now.has(CANCELS) else 0 for now in (before, after)]
    assert ended[1] - ended[0] == 1
    spent = [now.value("quire_cancel_to_free_seconds_sum") if now.has(CANCELS) else 0 for now in (before, after)]
    assert spent[1] - spent[0] < 0.5


CANCELS = "quire_cancel_to_free_seconds_count"


# Clients that do not read


class Unread:
    """A stream of a connection of its own with a small window, which nobody reads."""

    def __init__(self, quire: RunningQuire, max_tokens: int = LONG, number: int = 0) -> None:
        options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16384)]
        options.append(("grpc.use_local_subchannel_pool", 1))
        self._channel = grpc.insecure_channel(quire.addresses["gateway"], options=options)
        request = prompt_request(f"unread {number}", max_tokens)
        request.output.logprobs = 20
        self.call = gateway_pb2_grpc.GatewayStub(self._channel).Generate(request, timeout=CALL_SECONDS)

    def close(self) -> None:
        self._channel.close()


def slow_clients(quire: RunningQuire) -> float:
    return shown(quire).values("quire_slow_clients_total", "model_name").get("tiny-llama", 0)


def test_a_client_that_does_not_read_is_ended_and_reads_why_when_it_comes_back(quire: RunningQuire) -> None:
    before = slow_clients(quire)
    unread = Unread(quire)
    next(unread.call)
    until(lambda: slow_clients(quire) == before + 1)
    assert quire.settled_pool().sequences == 0
    error: Any = failure(unread.call)
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.details() in (
        "nothing was read for more than 1 s",
        "more than 256 tokens waited for being read",
    )
    unread.close()


def test_a_client_over_http_that_does_not_read_is_ended_too_and_its_connection_closed(quire: RunningQuire) -> None:
    before = slow_clients(quire)
    answer = {"max_tokens": LONG, "ignore_eos": True, "stream": True, "logprobs": 20}
    body = json.dumps({"prompt": "unread", **answer}).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = quire.http_url.removeprefix("http://").split(":")
        client.connect((host, int(port)))
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
        )
        client.sendall(head.encode() + b"\r\n\r\n" + body)
        until(lambda: slow_clients(quire) == before + 1)
        assert quire.settled_pool().sequences == 0
        client.settimeout(CALL_SECONDS)
        with suppress(ConnectionResetError):
            while client.recv(65536):
                pass


def test_no_place_is_kept_for_clients_that_do_not_read(quire: RunningQuire) -> None:
    before = slow_clients(quire)
    unread = [Unread(quire, number=number) for number in range(SEQUENCES)]
    until(lambda: slow_clients(quire) == before + SEQUENCES)
    with ThreadPoolExecutor(MAX_REQUESTS) as clients:
        answers = list(clients.map(lambda n: quire.generate(prompt_request(f"{n}", 5)), range(MAX_REQUESTS)))
    assert [len(answer.token_ids) for answer in answers] == [5] * MAX_REQUESTS
    for one in unread:
        one.close()


def test_other_streams_keep_their_pace_and_the_gateways_memory_its_bound(quire: RunningQuire) -> None:
    gateway = psutil.Process(quire.children()["gateway"])
    before = slow_clients(quire)
    unread = Unread(quire, number=9)
    memory = gateway.memory_info().rss
    assert longest_pause(quire) < 0.9, "a stream was held up by another's client, which is given a second"
    until(lambda: slow_clients(quire) == before + 1)
    assert gateway.memory_info().rss - memory < 20 * MIB
    unread.close()


def longest_pause(quire: RunningQuire) -> float:
    """Return the longest time between two messages of a stream that is read, in seconds."""
    times = [time.monotonic() for _ in quire.gateway.Generate(prompt_request("read", 400), timeout=CALL_SECONDS)]
    return max(after - before for before, after in pairwise(times[1:]))


def until(holds: Callable[[], bool], seconds: float = 20) -> None:
    deadline = threading.Event()
    timer = threading.Timer(seconds, deadline.set)
    timer.start()
    try:
        while not holds():
            assert not deadline.wait(0.05), "it did not come about"
    finally:
        timer.cancel()
