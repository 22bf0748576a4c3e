"""The supervisor of `quire serve` restarts its services, and they end with it."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from quire.v1 import kvmanager_pb2
from tests.load import prompt_request
from tests.running_quire import CALL_SECONDS, Answer, RunningQuire, start_quire
from tests.timing import standing_still

STOP_SECONDS = 120
REQUEST = prompt_request("The quick brown fox", 40)


@pytest.fixture(scope="module")
def two_engines(tiny_model: Callable[[str], Path]) -> Iterator[RunningQuire]:
    """A gateway on any port, and two engines that share 64 blocks."""
    options = ("--engines", "2", "--engine-id", "pair", "--device-blocks", "64", "--listen", "127.0.0.1:0")
    one = start_quire("--model", str(tiny_model("llama")), *options)
    yield one
    one.close()


def processes(quire: RunningQuire) -> dict[str, psutil.Process]:
    """Return the services by their labels in the log."""
    found = {}
    for process in psutil.Process(quire.process.pid).children():
        command = process.cmdline()
        name = command[command.index("-m") + 2]
        engine = re.search(r"(engine-\d)\.sock", command[command.index("--listen") + 1])
        found[engine[1] if engine else name] = process
    return found


def kill(quire: RunningQuire, *labels: str) -> int:
    """Kill services, and return the number of the first line of the log after that."""
    running, line = processes(quire), len(quire.lines)
    for label in labels:
        running[label].kill()
    return line


def test_engines_share_the_memory_and_have_separate_pools(two_engines: RunningQuire) -> None:
    pools = two_engines.kvmanager.ListPools(kvmanager_pb2.ListPoolsRequest(), timeout=CALL_SECONDS).pools
    assert {pool.engine_id: pool.device_blocks for pool in pools} == {"pair-0": 32, "pair-1": 32}
    assert sorted(processes(two_engines)) == ["engine-0", "engine-1", "gateway", "kvmanager"]


@pytest.mark.parametrize("labels", [("engine-0", "engine-1"), ("kvmanager",)], ids=["engines", "kvmanager"])
def test_a_request_continues_when_services_are_killed_and_restarted(
    two_engines: RunningQuire, labels: tuple[str, ...]
) -> None:
    expected = two_engines.generate(REQUEST).token_ids
    with ThreadPoolExecutor(1) as client:
        with ExitStack() as stopped:  # so that the request runs when they are killed
            for label in labels:
                stopped.enter_context(standing_still(processes(two_engines)[label].pid))
            call = two_engines.gateway.Generate(REQUEST, timeout=CALL_SECONDS)
            answer = client.submit(Answer.of, call)
            line = kill(two_engines, *labels)
        for label in labels:
            restart = two_engines.output.wait_for(f"{label} was ended by SIGKILL: starting it again", after=line)
            assert restart.startswith("serve     | ERROR ")
            assert restart.endswith(" at once, restart 1 of at most 5")
        assert answer.result().token_ids == expected
    for number in (0, 1):  # also at a new KV manager
        two_engines.output.wait_for(f"engine attached engine=pair-{number} ", after=line)


def test_a_killed_gateway_is_restarted_at_its_address(two_engines: RunningQuire) -> None:
    expected = two_engines.generate(REQUEST).token_ids
    line = kill(two_engines, "gateway")
    two_engines.output.wait_for("gateway is ready", after=line)
    call = two_engines.gateway.Generate(REQUEST, timeout=CALL_SECONDS, wait_for_ready=True)
    assert Answer.of(call).token_ids == expected


def test_a_terminated_service_is_restarted(two_engines: RunningQuire) -> None:
    line = len(two_engines.lines)
    processes(two_engines)["gateway"].terminate()
    restart = two_engines.output.wait_for("starting it again", after=line)
    assert restart.startswith("serve     | WARNING gateway was stopped: starting it again ")
    two_engines.output.wait_for("gateway is ready", after=line)


def test_the_services_end_when_their_supervisor_is_killed(two_engines: RunningQuire) -> None:
    """The last test here: no service is left."""
    services = list(processes(two_engines).values())
    assert len(services) == 4
    os.kill(two_engines.process.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(services, timeout=STOP_SECONDS)
    assert alive == []
