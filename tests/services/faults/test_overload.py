"""Overload of a running Quire: rejections with their retry delay, exceeded deadlines, and slow clients."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from google.rpc import error_details_pb2, status_pb2

from quire.v1 import gateway_pb2_grpc
from tests.faults import wait_until
from tests.load import prompt_request, slow_request
from tests.running_quire import CALL_SECONDS, Answer, RunningQuire, start_quire
from tests.services.test_metrics import open_streams, quiet, scrape
from tests.timing import in_time, standing_still

SEQUENCES, MAX_REQUESTS = 2, 5
LONG = 1900
MIB = 1024 * 1024
SLOW_SECONDS = 2
DEADLINE_SECONDS = 1.5


@pytest.fixture(scope="module")
def quire(tiny_model: Callable[[str], Path]) -> Iterator[RunningQuire]:
    """A Quire that runs two sequences at a time and admits five requests."""
    one = start_quire(
        *("--model", str(tiny_model("llama")), "--device-blocks", "512", "--max-sequences", str(SEQUENCES)),
        *("--max-requests", str(MAX_REQUESTS), "--max-queued-tokens", "4500"),
        *("--slow-client-seconds", str(SLOW_SECONDS), "--max-buffered-tokens", "256"),
        # A stopped engine must not count as lost.
        *("--link-timeout-seconds", str(CALL_SECONDS), "--http-listen", "127.0.0.1:0"),
    )
    yield one
    assert one.settled_pool().sequences == 0
    assert one.close() == 0


@contextmanager
def running(quire: RunningQuire, count: int = SEQUENCES) -> Iterator[list[Any]]:
    """Keep `count` long requests running."""
    calls = [quire.gateway.Generate(slow_request(f"{n}", LONG), timeout=CALL_SECONDS) for n in range(count)]
    try:
        for call in calls:
            next(call)
        yield calls
    finally:
        for call in calls:
            call.cancel()
        quiet(quire)


def stopped_engine(quire: RunningQuire) -> AbstractContextManager[None]:
    """Stop the engine's process inside the context."""
    return standing_still(quire.children()["engine"])


def failure(call: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        list(call)
    return caught.value


# Rejected


def test_a_request_beyond_the_limit_is_rejected_at_once_with_a_retry_delay(quire: RunningQuire) -> None:
    with stopped_engine(quire):
        calls = [quire.gateway.Generate(prompt_request(f"{n}", 5), timeout=CALL_SECONDS) for n in range(MAX_REQUESTS)]
        wait_until(lambda: open_streams(quire)["grpc"] == MAX_REQUESTS, "the requests are admitted")
        error: Any = failure(quire.gateway.Generate(prompt_request("one more", 5), timeout=CALL_SECONDS))
        assert all(call.is_active() for call in calls), "the request waited in the queue"
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.details().startswith("5 sequences are in flight, the limit is 5; retry in about ")
        assert retry_delay(error) > 0
    assert [len(Answer.of(call).token_ids) for call in calls] == [5] * MAX_REQUESTS
    quire.generate(prompt_request("again", 5))


def retry_delay(error: Any) -> float:
    """Return the seconds of Google's RetryInfo, and compare them with gRPC's own field."""
    metadata = dict(error.trailing_metadata())
    status = status_pb2.Status.FromString(metadata["grpc-status-details-bin"])
    assert (status.code, status.message) == (grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], error.details())
    retry = error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(retry)
    seconds = retry.retry_delay.ToTimedelta().total_seconds()
    assert float(metadata["grpc-retry-pushback-ms"]) == pytest.approx(1000 * seconds, abs=1)
    return seconds


def test_queued_tokens_are_bounded_and_running_requests_do_not_count(quire: RunningQuire) -> None:
    before = scrape(quire, "gateway").values("quire_admission_rejections_total", "reason").get("max_queued_tokens", 0)
    with running(quire), stopped_engine(quire):
        others = open_streams(quire)["grpc"]
        waiting = [quire.gateway.Generate(prompt_request(f"w{n}", LONG), timeout=CALL_SECONDS) for n in range(2)]
        wait_until(lambda: open_streams(quire)["grpc"] == others + 2, "the requests are admitted")
        error: Any = failure(quire.gateway.Generate(prompt_request("too much", LONG), timeout=CALL_SECONDS))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "tokens are queued, the limit is 4500" in error.details()
        assert retry_delay(error) > 0
        for call in waiting:
            call.cancel()
            assert call.code() == grpc.StatusCode.CANCELLED
    assert scrape(quire, "gateway").value("quire_admission_rejections_total", reason="max_queued_tokens") == before + 1


# Deadlines


@pytest.mark.parametrize(
    ("phase", "by_call"),
    [("queued", False), ("running", False), ("running", True)],
    ids=["queued, timeout", "running, timeout", "running, deadline of the call"],
)
def test_an_exceeded_deadline_is_counted_by_whether_the_request_was_queued_or_running(
    quire: RunningQuire, phase: str, by_call: bool
) -> None:
    before = deadlines(quire)
    request = slow_request("late", LONG)
    if not by_call:
        request.timeout.FromTimedelta(timedelta(seconds=DEADLINE_SECONDS))
    with running(quire) if phase == "queued" else nullcontext():
        call = quire.gateway.Generate(request, timeout=DEADLINE_SECONDS if by_call else CALL_SECONDS)
        assert begun(call) == (phase == "running")
        with suppress(grpc.RpcError):
            list(call)
        assert call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        if not by_call:
            known = "before the first token" if phase == "queued" else "while the request was running"
            assert call.details() == f"timeout exceeded {known}"
        wait_until(lambda: sum(deadlines(quire).values()) > sum(before.values()), "the request is counted")
    counted = {name: count - before[name] for name, count in deadlines(quire).items()}
    assert counted == {"queued": int(phase == "queued"), "running": int(phase == "running")}
    quiet(quire)


def begun(call: Any) -> bool:
    try:
        return bool(next(call).HasField("started"))
    except grpc.RpcError:
        return False


def deadlines(quire: RunningQuire) -> dict[str, float]:
    return {"queued": 0.0, "running": 0.0} | scrape(quire, "gateway").values("quire_deadline_exceeded_total", "phase")


# Disconnected clients


def test_the_blocks_of_a_disconnected_client_are_freed_and_the_time_is_exported(quire: RunningQuire) -> None:
    def cancels() -> tuple[float, float]:
        now = scrape(quire, "gateway").values
        counts, sums = (now(f"quire_cancel_to_free_seconds_{of}", "model_name") for of in ("count", "sum"))
        return counts.get("tiny-llama", 0), sums.get("tiny-llama", 0)

    with running(quire, 1) as calls:
        (count, seconds), begun = cancels(), time.monotonic()
        calls[0].cancel()
        assert quire.settled_pool().device.held == 0
    wait_until(lambda: cancels()[0] == count + 1, "the time is exported")
    assert 0 < cancels()[1] - seconds < time.monotonic() - begun


# Slow clients


class Unread:
    """An unread stream on its own connection with a small window."""

    def __init__(self, quire: RunningQuire, number: int) -> None:
        options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16384)]
        options.append(("grpc.use_local_subchannel_pool", 1))
        self._channel = grpc.insecure_channel(quire.addresses["gateway"], options=options)
        request = prompt_request(f"unread {number}", LONG)
        request.output.logprobs = 20
        self.call = gateway_pb2_grpc.GatewayStub(self._channel).Generate(request, timeout=CALL_SECONDS)

    def close(self) -> None:
        self._channel.close()


def slow_clients(quire: RunningQuire) -> float:
    return scrape(quire, "gateway").values("quire_slow_clients_total", "model_name").get("tiny-llama", 0)


def test_a_slow_http_client_is_disconnected(quire: RunningQuire) -> None:
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
        wait_until(lambda: slow_clients(quire) == before + 1, "the stream is ended", CALL_SECONDS)
        assert quire.settled_pool().sequences == 0
        client.settimeout(CALL_SECONDS)
        with suppress(ConnectionResetError):
            while client.recv(65536):
                pass


def test_streams_of_slow_clients_end_with_the_reason_and_make_room_for_other_requests(quire: RunningQuire) -> None:
    before = slow_clients(quire)
    unread = [Unread(quire, number) for number in range(SEQUENCES)]
    next(unread[0].call)
    wait_until(lambda: slow_clients(quire) == before + SEQUENCES, "the streams are ended", CALL_SECONDS)
    with ThreadPoolExecutor(MAX_REQUESTS) as clients:
        answers = list(clients.map(lambda n: quire.generate(prompt_request(f"{n}", 5)), range(MAX_REQUESTS)))
    assert [len(answer.token_ids) for answer in answers] == [5] * MAX_REQUESTS
    assert quire.settled_pool().sequences == 0
    for one in unread:
        error: Any = failure(one.call)
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.details() in (
            f"the client read nothing for more than {SLOW_SECONDS} s",
            "the client left more than 256 tokens unread",
        )
        one.close()


def test_a_slow_client_delays_no_other_stream_and_memory_stays_bounded(quire: RunningQuire) -> None:
    gateway = psutil.Process(quire.children()["gateway"])

    def is_undelayed() -> bool | None:
        """Return None if the machine paused."""
        before = slow_clients(quire)
        unread = Unread(quire, 9)
        memory = gateway.memory_info().rss
        pause = longest_pause(quire)
        wait_until(lambda: slow_clients(quire) == before + 1, "the stream is ended", CALL_SECONDS)
        assert gateway.memory_info().rss - memory < 20 * MIB
        unread.close()
        return pause < 0.9 * SLOW_SECONDS or None

    assert in_time(is_undelayed, "a slow client delays no other stream")


def longest_pause(quire: RunningQuire) -> float:
    """Return the longest time between two messages of a stream, in seconds."""
    times = [time.monotonic() for _ in quire.gateway.Generate(prompt_request("read", 400), timeout=CALL_SECONDS)]
    return max(after - before for before, after in pairwise(times[1:]))
