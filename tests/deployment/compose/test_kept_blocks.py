"""Engines of the profile `cpu` that die find their blocks when they return. On other ports, without monitoring."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import pytest

from quire.v1 import gateway_pb2_grpc
from tests.deployment.compose.stack import PROJECT, Stack, docker, inspect
from tests.faults import wait_until
from tests.load import prompt_request
from tests.running_quire import CALL_SECONDS, Answer, open_channel
from tests.scrape import Scrape

GRPC = "127.0.0.1:50251"
PORTS = {"QUIRE_GRPC_PORT": "50251", "QUIRE_HTTP_PORT": "8200", "QUIRE_MAP_PORT": "8253"}
FOLDER = "/var/lib/quire/kept-blocks"
PROMPT = "The first thing a sailor learns is " * 12
BLOCK, TOKENS = 16, 8
RESTART_SECONDS = 300
MOUNTS = Path("/proc/mounts")

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("stack"), COMPOSE_PROFILES="cpu", QUIRE_ENGINES="2", **PORTS)
    stack.up()
    yield stack
    stack.down()


def answer() -> Answer:
    with open_channel(GRPC) as channel:
        request = prompt_request(PROMPT, TOKENS)
        return Answer.of(gateway_pb2_grpc.GatewayStub(channel).Generate(request, timeout=CALL_SECONDS))


def wait_until_linked(stack: Stack) -> None:
    """Wait for the engines after a restart, and for the gateway, whose own check does not fail meanwhile."""
    stack.wait_until_healthy("engine")
    wait_until(_is_answered, "the gateway is linked again", RESTART_SECONDS)


def _is_answered() -> bool:
    try:
        return answer().finished.usage.generated_tokens == TOKENS
    except grpc.RpcError:
        return False


def adopted(stack: Stack) -> float:
    """Return how many blocks the engines found at their last start."""
    pages = [Scrape.of(f"http://{address}/metrics") for address in stack.metrics_addresses("engine")]
    return sum(page.value("quire_kept_blocks_adopted", tier="device") for page in pages)


def kill_with_the_manager(stack: Stack) -> None:
    """Docker starts none that was killed by it, so that all are gone at the same moment."""
    killed = [*stack.containers("kvmanager"), *stack.containers("engine")]
    docker("kill", *killed)
    docker("start", *killed)


def kill_the_processes(stack: Stack) -> None:
    """As the kernel does when a container exceeds its memory; Docker restarts the containers."""
    before = {one: inspect(one) for one in stack.containers("engine")}
    processes = [facts["State"]["Pid"] for facts in before.values()]
    if not all(_is_engine(one) for one in processes):
        pytest.skip("processes of the daemon's containers cannot be seen from here")
    for one in processes:
        os.kill(one, signal.SIGKILL)
    wait_until(lambda: _have_restarted(before), "the engines restart", RESTART_SECONDS)


def _have_restarted(before: dict[str, Any]) -> bool:
    return all(inspect(one)["RestartCount"] > facts["RestartCount"] for one, facts in before.items())


def _is_engine(process: int) -> bool:
    with suppress(OSError):
        return b"quire\0engine" in Path(f"/proc/{process}/cmdline").read_bytes()
    return False


@pytest.mark.parametrize("kill", [kill_with_the_manager, kill_the_processes])
def test_blocks_of_killed_engines_are_there_when_they_return(stack: Stack, kill: Callable[[Stack], None]) -> None:
    first = answer()
    kill(stack)
    wait_until_linked(stack)
    assert adopted(stack) > 0
    again = answer()
    whole = (first.started.prompt_tokens - 1) // BLOCK * BLOCK
    assert again.started.cached_tokens == whole > 0
    assert again.token_ids == first.token_ids


def test_each_engine_has_a_file_that_no_other_service_can_read(stack: Stack) -> None:
    hosts = (docker("exec", one, "hostname").strip() for one in stack.containers("engine"))
    names = {quote(f"{host}:0.0.0.0:50052", safe="") for host in hosts}
    found = stack.run_inside("engine", "find", FOLDER, "-type", "f", "-printf", "%f %m %u\n").stdout.splitlines()
    assert {line.split()[0] for line in found} == {f"{name}.blocks" for name in names}
    assert {tuple(line.split()[1:]) for line in found} == {("600", "quire")}
    for service in ("kvmanager", "gateway"):
        assert "Permission denied" in stack.run_inside(service, "ls", "/root/kept-blocks").stderr


def test_a_planned_end_erases_the_blocks(stack: Stack) -> None:
    answer()
    stack.succeed("restart", "engine", seconds=RESTART_SECONDS)
    wait_until_linked(stack)
    assert adopted(stack) == 0


def test_nothing_is_left_when_the_stack_is_down(stack: Stack) -> None:
    """The volume's memory is freed with its mount, of which only a daemon of this machine tells."""
    answer()
    place = docker("volume", "inspect", "--format", "{{.Mountpoint}}", f"{PROJECT}_kept-blocks").strip()
    if f" {place} tmpfs " not in MOUNTS.read_text():
        pytest.skip("the daemon's mounts cannot be seen from here")
    stack.down()
    assert f" {place} " not in MOUNTS.read_text()
