"""The profile `ranks`: one engine of three processes, in one container. On other ports, without monitoring."""

import json
import urllib.request
from collections.abc import Iterator

import pytest

from quire.v1 import gateway_pb2_grpc
from tests.deployment.compose.stack import START_SECONDS, Stack, inspect, log_of
from tests.faults import wait_until
from tests.load import prompt_request
from tests.running_quire import CALL_SECONDS, Answer, open_channel

ENGINE = "engine-ranks"
SERVICES = ("kvmanager", ENGINE, "gateway")
GRPC, HTTP, MAP = "127.0.0.1:50151", "127.0.0.1:8100", "127.0.0.1:8153"
PORTS = {"QUIRE_GRPC_PORT": "50151", "QUIRE_HTTP_PORT": "8100", "QUIRE_MAP_PORT": "8153"}
# A log of one file, and a command that writes many times its size to the child of process 1.
LOGS = {"QUIRE_LOG_SIZE": "4k", "QUIRE_LOG_FILES": "1"}
LOG_BYTES, LAST_LINE = 4096, '"message": "102000"'
WRITER = 'seq 100000 102000 >/proc/$(cut -d " " -f 1 /proc/1/task/1/children)/fd/2'
# Kill one process of a rank other than 0. The pattern does not match the command line of this script itself.
KILL = 'for p in /proc/[0-9]*; do if grep -q "[w]orker_process" $p/cmdline; then kill -9 ${p#/proc/}; exit; fi; done'

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("stack"), COMPOSE_PROFILES="ranks", **PORTS, **LOGS)
    stack.succeed("up", "--detach", "--no-build", seconds=START_SECONDS)
    for service in SERVICES:
        stack.wait_until_healthy(service)
    yield stack
    stack.down()


def answer(tokens: int) -> Answer:
    with open_channel(GRPC) as channel:
        request = prompt_request("The first thing a sailor learns is", tokens)
        return Answer.of(gateway_pb2_grpc.GatewayStub(channel).Generate(request, timeout=CALL_SECONDS))


def test_three_ranks_answer_a_request_from_outside(stack: Stack) -> None:
    assert answer(24).finished.usage.generated_tokens == 24
    done = stack.run_inside(ENGINE, "sh", "-c", "grep -l worker_process /proc/[0-9]*/cmdline")
    assert len([line for line in done.stdout.splitlines() if "self" not in line]) >= 2


def test_without_the_profile_monitoring_nothing_else_runs(stack: Stack) -> None:
    running = {inspect(one)["Config"]["Labels"]["com.docker.compose.service"] for one in stack.running()}
    assert running == set(SERVICES)


def test_every_port_is_the_one_of_its_variable(stack: Stack) -> None:
    with urllib.request.urlopen(f"http://{HTTP}/ready", timeout=CALL_SECONDS) as ready:
        assert ready.status == 200
    bound = [inspect(stack.container(one))["HostConfig"]["PortBindings"] or {} for one in SERVICES]
    places = {f"{one['HostIp']}:{one['HostPort']}" for ports in bound for (one,) in ports.values()}
    assert places == {GRPC, HTTP, MAP}


def test_a_log_beyond_its_size_loses_its_oldest_lines(stack: Stack) -> None:
    """The lines are written to the gateway's own output, as a native library would write them."""
    assert stack.run_inside("gateway", "sh", "-c", WRITER).returncode == 0
    wait_until(lambda: LAST_LINE in log_of(stack.container("gateway")), "the last line is logged")
    log = log_of(stack.container("gateway"))
    assert len(log) <= LOG_BYTES
    _, *whole = log.splitlines()  # the oldest line, perhaps the only one, may have lost its beginning
    assert {json.loads(line)["service"] for line in whole} <= {"gateway"}


def test_the_block_map_shows_one_pool(stack: Stack) -> None:
    with urllib.request.urlopen(f"http://{MAP}/api/pools", timeout=CALL_SECONDS) as response:
        assert len(json.load(response)["pools"]) == 1


def test_the_container_restarts_when_a_rank_is_killed(stack: Stack) -> None:
    before = inspect(stack.container(ENGINE))["RestartCount"]
    stack.run_inside(ENGINE, "sh", "-c", KILL)
    wait_until(lambda: inspect(stack.container(ENGINE))["RestartCount"] > before, "the engine restarts")
    stack.wait_until_healthy(ENGINE)
    wait_until(lambda: answer(4).finished.usage.generated_tokens == 4, "the gateway is linked again")
