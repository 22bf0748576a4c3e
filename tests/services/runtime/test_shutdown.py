"""How `quire serve` ends when it is asked to: readiness first, then the requests under way, then the processes."""

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc
import httpx
import pytest

from services.gateway.settings import GatewaySettings
from tests.faults import wait_until
from tests.load import prompt_request
from tests.running_quire import CALL_SECONDS, Answer, HealthWatch, RunningQuire, RunningService, start_quires
from tests.timing import in_time, standing_still

GATEWAY = "quire.v1.Gateway"
STREAMS = 6
PROMPT = "The quick brown fox"
REQUEST = prompt_request(PROMPT, 200)
ENDLESS = prompt_request(PROMPT, 1900)
SHORT_GRACE_SECONDS = 0.5


@pytest.fixture(scope="module")
def quires(tiny_model: Callable[[str], Path]) -> Iterator[dict[str, RunningQuire]]:
    """One Quire for each way to end it, started together because that takes less time."""
    pool = ("--device-blocks", "256", "--max-sequences", "16")
    common = ("--model", str(tiny_model("llama")), *pool, "--http-listen", "127.0.0.1:0")
    # Engines that stand still in between are not gone.
    common = (*common, "--link-timeout-seconds", str(CALL_SECONDS))
    short = ("--grace-seconds", str(SHORT_GRACE_SECONDS))
    started = start_quires(common, common, (*common, *short))
    yield dict(zip(("SIGTERM", "SIGINT", "short grace"), started, strict=True))
    for one in started:
        one.close()


def begin(quire: RunningQuire, count: int) -> list[grpc.Call]:
    """Begin streams, and return when each of them has its first blocks."""
    request = REQUEST if count == STREAMS else ENDLESS
    calls = [quire.gateway.Generate(request, timeout=CALL_SECONDS) for _ in range(count)]
    for call in calls:
        assert next(call).HasField("started")
    return calls


def over_http(client: httpx.Client, *, stream: bool) -> str:
    """Ask for a long answer, and return its text."""
    body = {"prompt": PROMPT, "max_tokens": 800, "temperature": 0, "ignore_eos": True, "stream": stream}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200
    if not stream:
        return str(answer.json()["choices"][0]["text"])
    lines = answer.text.strip().split("\n\n")
    assert lines[-1] == "data: [DONE]"
    return "".join(json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines[:-1])


def finish(call: grpc.Call) -> Answer | grpc.StatusCode:
    try:
        return Answer.of(call)
    except grpc.RpcError as error:
        return error.code()


def assert_nothing_is_left(quire: RunningQuire, services: dict[str, int]) -> None:
    assert sorted(services) == ["engine", "gateway", "kvmanager"]
    assert [name for name, pid in services.items() if Path(f"/proc/{pid}").exists()] == []
    folder = Path(quire.addresses["engine"].removeprefix("unix:")).parent
    assert folder.name.startswith("quire-")
    assert not folder.exists()
    assert not [line for line in quire.lines if "Traceback" in line or "Error" in line]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_lets_running_requests_finish_and_rejects_new_ones(quires: dict[str, RunningQuire], name: str) -> None:
    quire = quires[name]
    expected = quire.generate(REQUEST).token_ids
    services = quire.children()
    watch = HealthWatch(quire.channel, GATEWAY)
    assert watch.next() == "SERVING"
    with (
        ThreadPoolExecutor(STREAMS + 2) as clients,
        httpx.Client(base_url=quire.http_url, timeout=CALL_SECONDS) as http,
        ExitStack() as meanwhile,  # the engine stands still
    ):

        def all_under_way() -> tuple[list["Future[str]"], list[grpc.Call]] | None:
            answers = [clients.submit(over_http, http, stream=stream) for stream in (True, False)]
            wait_until(lambda: quire.pool().sequences == 2 or any(one.done() for one in answers), "they have begun")
            calls = begin(quire, STREAMS)
            meanwhile.enter_context(standing_still(services["engine"]))
            if quire.pool().sequences == 2 + STREAMS:
                return answers, calls
            meanwhile.close()
            for one in [*(clients.submit(finish, call) for call in calls), *answers]:
                one.result()
            return None

        (streamed, whole), calls = in_time(all_under_way, "no request is over when the last has begun")
        quire.process.send_signal(signal.Signals[name])
        assert watch.next() == "NOT_SERVING"
        late = http.post("/v1/completions", json={"prompt": PROMPT})
        assert (late.status_code, late.headers["connection"]) == (503, "close")
        assert http.get("/ready").status_code == 503
        with pytest.raises(grpc.RpcError) as refused:
            quire.generate(REQUEST)
        assert (refused.value.code(), refused.value.details()) == (
            grpc.StatusCode.UNAVAILABLE,
            "the gateway is draining",
        )
        assert all(call.is_active() for call in calls)
        assert not any(one.done() for one in (streamed, whole))
        meanwhile.close()
        answers = list(clients.map(finish, calls))
        assert streamed.result() == whole.result() != ""
    assert [isinstance(answer, Answer) and answer.token_ids for answer in answers] == [expected] * STREAMS
    assert quire.ended() == 0
    assert_nothing_is_left(quire, services)
    watch.close()


def test_requests_beyond_the_grace_time_are_aborted(
    quires: dict[str, RunningQuire],
) -> None:
    quire = quires["short grace"]
    services = quire.children()
    begun = time.monotonic()

    def cut_off() -> list[Answer | grpc.StatusCode] | None:
        nonlocal begun
        calls = begin(quire, 2)
        with standing_still(services["engine"]), ThreadPoolExecutor(len(calls)) as clients:
            if quire.pool().sequences < len(calls):
                for call in calls:
                    call.cancel()
                return None
            begun = time.monotonic()
            quire.terminate()
            return list(clients.map(finish, calls))

    assert in_time(cut_off, "both requests run when it is stopped") == [grpc.StatusCode.UNAVAILABLE] * 2
    assert quire.ended() == 0
    assert time.monotonic() - begun < GatewaySettings().grace_seconds, "3 services with half a second each"
    assert_nothing_is_left(quire, services)


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
