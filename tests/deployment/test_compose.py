"""The stack of docker-compose.yml, built and run: `make compose-check`. It needs a Docker daemon, and takes minutes."""

import json
import math
import re
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.v1 import gateway_pb2, gateway_pb2_grpc
from tests.dashboard import AFTER_FAULTS, ON_DEMAND, dashboards, queries
from tests.load import prompt_request, run_streams
from tests.prometheus import ALERTS, NoPrometheus, RunningPrometheus, prometheus_folder
from tests.running_quire import CALL_SECONDS, Answer, open_channel

ROOT = Path(__file__).parents[2]
PROJECT = "quire-check"
SERVICES = ("kvmanager", "engine", "gateway")
METRICS_PORTS = {"gateway": 9151, "engine": 9152, "kvmanager": 9153}
ADDRESS = "127.0.0.1:50051"
HTTP_URL = "http://127.0.0.1:8000"
BUILD_SECONDS, START_SECONDS, DOWN_SECONDS = 1800, 900, 120
STREAMS = 16
LEAST_SCRAPES = 8  # while requests run: rates are taken over some of them

pytestmark = pytest.mark.timeout(3600)


def docker(*arguments: str, seconds: float = 60) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, f"docker {' '.join(arguments)}: {done.stderr}"
    return done.stdout


def compose(*arguments: str, seconds: float = 60) -> "subprocess.CompletedProcess[str]":
    """Run docker compose, or docker-compose where it is a command of its own, on the project's file."""
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0
    command = ["docker", "compose"] if plugin else ["docker-compose"]
    return subprocess.run(
        [*command, "--project-name", PROJECT, "--file", str(ROOT / "docker-compose.yml"), *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def succeed(*arguments: str, seconds: float) -> None:
    done = compose(*arguments, seconds=seconds)
    assert done.returncode == 0, f"compose {' '.join(arguments)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"


class Stack:
    """The three containers, and a client outside of them."""

    def __init__(self) -> None:
        self.containers = {service: self._container(service) for service in SERVICES}
        self.channel = open_channel(ADDRESS)
        self.gateway = gateway_pb2_grpc.GatewayStub(self.channel)

    def generate(self, request: gateway_pb2.GenerateRequest) -> Answer:
        return Answer.of(self.gateway.Generate(request, timeout=CALL_SECONDS))

    def state(self, service: str) -> dict[str, Any]:
        return json.loads(docker("inspect", self.containers[service]))[0]

    def wait_until_healthy(self, service: str, seconds: float = START_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while (status := self.state(service)["State"]["Health"]["Status"]) != "healthy":
            assert time.monotonic() < deadline, f"{service} is {status}: {docker('logs', self.containers[service])}"
            time.sleep(1)  # Docker pushes no health

    def run_inside(self, service: str, *command: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            ["docker", "exec", self.containers[service], *command], capture_output=True, text=True, check=False
        )

    @staticmethod
    def _container(service: str) -> str:
        return compose("ps", "--quiet", service).stdout.strip()


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Quire's part of the stack, from nothing: built, its volume empty, and up once all health checks pass."""
    succeed("down", "--volumes", seconds=DOWN_SECONDS)
    succeed("build", *SERVICES, seconds=BUILD_SECONDS)
    succeed("up", "--detach", *SERVICES, seconds=START_SECONDS)
    one = Stack()
    one.wait_until_healthy("gateway")
    yield one
    one.channel.close()
    succeed("down", "--volumes", seconds=DOWN_SECONDS)


def test_each_service_waits_for_the_health_of_the_one_before_it(stack: Stack) -> None:
    started = [stack.state(service)["State"]["StartedAt"] for service in SERVICES]
    assert started == sorted(started)
    for service in SERVICES:
        stack.wait_until_healthy(service)


def test_a_request_from_outside_streams(stack: Stack) -> None:
    answer = stack.generate(prompt_request("The first thing a sailor learns is", 24))
    assert answer.events == ["started", *["delta"] * len(answer.deltas), "finished"]
    assert len(answer.deltas) > 12
    assert answer.finished.usage.generated_tokens == 24
    assert answer.started.model == "demo"


def test_the_command_of_the_readme_answers(stack: Stack) -> None:
    done = stack.run_inside("gateway", "quire", "generate", "--chat", "Why is the sky blue?", "--max-tokens", "8")
    assert done.returncode == 0
    assert len(done.stdout.split()) >= 3


@pytest.mark.parametrize("service", SERVICES)
def test_nothing_runs_as_root_or_can_write_outside_its_folders(stack: Stack, service: str) -> None:
    look = "for s in /proc/[0-9]*/status; do grep -h ^Uid $s; done"
    users = {line.split()[1] for line in stack.run_inside(service, "sh", "-c", look).stdout.splitlines()}
    assert users == {"10001"}
    for place in ("/", "/opt/quire", "/usr/bin"):
        assert "Read-only file system" in stack.run_inside(service, "touch", f"{place}/x").stderr
    assert stack.run_inside(service, "touch", "/tmp/x").returncode == 0
    privileges = stack.run_inside(service, "grep", "-E", "^(CapEff|CapBnd|NoNewPrivs)", "/proc/1/status").stdout
    assert set(privileges.split()[1::2]) == {"0000000000000000", "1"}


def test_only_the_gateway_is_published_and_on_this_machine_alone(stack: Stack) -> None:
    published = {service: stack.state(service)["HostConfig"]["PortBindings"] or {} for service in SERVICES}
    assert published == {
        "kvmanager": {},
        "engine": {},
        "gateway": {f"{port}/tcp": [{"HostIp": "127.0.0.1", "HostPort": port}] for port in ("50051", "8000")},
    }


def test_the_gateway_answers_over_http_from_outside(stack: Stack) -> None:
    body = json.dumps({"prompt": "The sky is", "max_tokens": 4, "temperature": 0}).encode()
    request = urllib.request.Request(f"{HTTP_URL}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=CALL_SECONDS) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 4


def test_a_prometheus_that_scrapes_the_containers_has_data_for_every_query(stack: Stack, tmp_path: Path) -> None:
    try:
        commands = prometheus_folder()
    except NoPrometheus as reason:
        pytest.skip(f"needs Prometheus: {reason}")
    targets = {}
    for service, port in METRICS_PORTS.items():
        (network,) = stack.state(service)["NetworkSettings"]["Networks"].values()
        targets[service] = f"{network['IPAddress']}:{port}"
    prometheus = RunningPrometheus(commands, tmp_path, targets, {ALERTS.name: ALERTS.read_text()})
    try:
        prometheus.wait_until("count(up == 1) == 3")
        start = time.time()
        requests = [prompt_request(f"Sailor number {number} wrote", 64) for number in range(STREAMS)]
        while not prometheus.query(f"count_over_time(up[{math.ceil(time.time() - start)}s]) >= {LEAST_SCRAPES}"):
            run_streams(stack, requests, STREAMS)
        end = time.time()
        asked = [query for query in queries() if not query.needs(*AFTER_FAULTS, *ON_DEMAND)]
        empty = [query for query in asked if not prometheus.query_range(query.executable(), start, end)]
        assert empty == []
        off = "sum by (engine, tier) (quire_kv_blocks) != on (engine, tier) quire_kv_pool_blocks"
        assert prometheus.query_range(off, start, end) == []
        assert prometheus.query_range("up != 1", start, end) == []
    finally:
        prometheus.close()


def test_prometheus_and_grafana_of_the_stack_show_the_dashboards_and_know_the_alerts(stack: Stack) -> None:
    monitoring = ("prometheus", "grafana")
    compose("pull", *monitoring, seconds=600)
    for image in re.findall(r"image: (\S+:\S+)", (ROOT / "docker-compose.yml").read_text()):
        if subprocess.run(["docker", "image", "inspect", image], capture_output=True, check=False).returncode:
            pytest.skip(f"needs the image {image}, and no registry that has it can be reached")
    succeed("up", "--detach", *monitoring, seconds=START_SECONDS)
    _wait_for("http://127.0.0.1:9090/api/v1/query?query=count(up==1)", '"3"')
    _wait_for("http://127.0.0.1:9090/api/v1/rules?type=alert", "QuireNoGateway")
    for board in dashboards():
        _wait_for(f"http://127.0.0.1:3000/api/dashboards/uid/{board.uid}", board.panels[-1].title)


def test_down_lets_running_requests_finish_and_every_service_exits_with_0(stack: Stack) -> None:
    exits = {
        service: subprocess.Popen(["docker", "wait", container], stdout=subprocess.PIPE, text=True)
        for service, container in stack.containers.items()
    }
    first_delta = threading.Event()
    answer = Answer()

    def stream() -> None:
        for response in stack.gateway.Generate(prompt_request("A long story begins", 100), timeout=CALL_SECONDS):
            answer.add(response)
            if answer.deltas:
                first_delta.set()

    client = threading.Thread(target=stream)
    client.start()
    assert first_delta.wait(CALL_SECONDS)
    succeed("down", seconds=DOWN_SECONDS)
    client.join(CALL_SECONDS)
    assert answer.finished.usage.generated_tokens == 100
    assert {service: process.communicate()[0].strip() for service, process in exits.items()} == dict.fromkeys(
        SERVICES, "0"
    )
    assert compose("ps", "--quiet").stdout == ""


def _wait_for(url: str, text: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                found = answer.read().decode()
        except OSError as error:
            found = str(error)
        if text in found:
            return
        assert time.monotonic() < deadline, f"{url} does not show {text}: {found[:500]}"
        time.sleep(1)  # it can only be asked
