"""The order of a shutdown of `quire serve`: readiness, running requests, processes."""

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import grpc
import httpx
import pytest

from services.gateway.settings import GatewaySettings
from tests.faults import wait_until
from tests.load import SLOW_SEED, slow_request
from tests.running_quire import CALL_SECONDS, Answer, HealthWatch, RunningQuire, RunningService, start_quires
from tests.timing import standing_still

STREAMS = 4
PROMPT = "The quick brown fox"
REQUEST = slow_request(PROMPT, 200)
SHORT_GRACE_SECONDS = 0.5


@pytest.fixture(scope="module")
def quires(tiny_model: Callable[[str], Path]) -> Iterator[list[RunningQuire]]:
    """One Quire that drains and one with a short grace time, which logs errors only."""
    pool = ("--model", str(tiny_model("llama")), "--device-blocks", "256", "--max-sequences", "16")
    common = (*pool, "--link-timeout-seconds", str(CALL_SECONDS))  # so that a stopped engine does not count as lost
    short = ("--grace-seconds", str(SHORT_GRACE_SECONDS), "--log-level", "error")
    started = start_quires((*common, "--http-listen", "127.0.0.1:0"), (*common, *short))
    yield started
    for one in started:
        one.close()


def begin(quire: RunningQuire, count: int) -> list[grpc.Call]:
    """Start streams, and return when each of them has its first blocks."""
    calls = [quire.gateway.Generate(REQUEST, timeout=CALL_SECONDS) for _ in range(count)]
    for call in calls:
        assert next(call).HasField("started")
    return calls


def complete_over_http(client: httpx.Client, *, stream: bool) -> str:
    """Return the text of a slow completion."""
    body = {"prompt": PROMPT, "max_tokens": 300, "temperature": 0, "ignore_eos": True, "seed": SLOW_SEED}
    answer = client.post("/v1/completions", json=body | {"stream": stream})
    assert answer.status_code == 200
    if not stream:
        return str(answer.json()["choices"][0]["text"])
    lines = answer.text.strip().split("\n\n")
    assert lines[-1] == "data: [DONE]"
    return "".join(json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines[:-1])


def serving(quire: RunningQuire) -> HealthWatch:
    watch = HealthWatch(quire.channel, "quire.v1.Gateway")
    assert watch.next() == "SERVING"
    return watch


def finish(call: grpc.Call) -> Answer | grpc.StatusCode:
    try:
        return Answer.of(call)
    except grpc.RpcError as error:
        return error.code()


def assert_no_process_or_folder_remains(quire: RunningQuire, services: dict[str, int]) -> None:
    assert sorted(services) == ["engine", "gateway", "kvmanager"]
    assert [name for name, pid in services.items() if Path(f"/proc/{pid}").exists()] == []
    folder = Path(quire.addresses["engine"].removeprefix("unix:")).parent
    assert folder.name.startswith("quire-")
    assert not folder.exists()
    assert not [line for line in quire.lines if "Traceback" in line or "Error" in line]


def test_sigterm_lets_running_requests_finish_and_rejects_new_ones(quires: list[RunningQuire]) -> None:
    quire = quires[0]
    services = quire.children()
    watch = serving(quire)
    with (
        ThreadPoolExecutor(STREAMS + 2) as clients,
        httpx.Client(base_url=quire.http_url, timeout=CALL_SECONDS) as http,
    ):
        streamed, whole = (clients.submit(complete_over_http, http, stream=stream) for stream in (True, False))
        wait_until(lambda: quire.pool().sequences == 2, "both HTTP requests run")
        calls = begin(quire, STREAMS)
        with standing_still(services["engine"]):
            assert quire.pool().sequences == 2 + STREAMS
            quire.process.send_signal(signal.SIGTERM)
            assert watch.next() == "NOT_SERVING"
            late = http.post("/v1/completions", json={"prompt": PROMPT})
            assert (late.status_code, late.headers["connection"]) == (503, "close")
            assert http.get("/ready").status_code == 503
            with pytest.raises(grpc.RpcError) as rejected:
                quire.generate(REQUEST)
            assert rejected.value.code() == grpc.StatusCode.UNAVAILABLE
            assert rejected.value.details() == "the gateway is draining"
            assert all(call.is_active() for call in calls)
            assert not any(one.done() for one in (streamed, whole))
        answers = [Answer.of(call) for call in calls]
        assert streamed.result() == whole.result()
    assert [len(answer.token_ids) for answer in answers] == [200] * STREAMS
    assert all(whole.result().startswith(answer.text.rstrip("\ufffd")) for answer in answers)
    assert quire.ended() == 0
    assert_no_process_or_folder_remains(quire, services)
    watch.close()


def test_after_sigint_requests_beyond_the_grace_time_are_aborted(quires: list[RunningQuire]) -> None:
    quire = quires[1]
    services = quire.children()
    watch = serving(quire)
    calls = begin(quire, 2)
    with standing_still(services["engine"]), ThreadPoolExecutor(len(calls)) as clients:
        assert quire.pool().sequences == len(calls)
        begun = time.monotonic()
        quire.process.send_signal(signal.SIGINT)
        assert watch.next() == "NOT_SERVING"
        assert list(clients.map(finish, calls)) == [grpc.StatusCode.UNAVAILABLE] * 2
    assert quire.ended() == 0
    assert time.monotonic() - begun < GatewaySettings().grace_seconds, "3 services with half a second each"
    assert_no_process_or_folder_remains(quire, services)
    assert {line.split(" | ")[0].strip() for line in quire.lines} == {"serve"}, "readiness does not depend on log lines"
    watch.close()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_repeated_signals_do_not_kill_a_service_that_shuts_down(
    service: Callable[..., RunningService], name: str
) -> None:
    one = service("kvmanager", "--listen", "127.0.0.1:0", "--grace-seconds", "0")
    while one.process.poll() is None:
        one.process.send_signal(signal.Signals[name])
        with suppress(subprocess.TimeoutExpired):
            one.process.wait(0.005)
    assert one.process.returncode == 0
