"""The stack with its defaults, one of each service and no TLS: `make compose-check`. It needs a Docker daemon."""

import json
import math
import re
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from quire.v1 import gateway_pb2, gateway_pb2_grpc
from tests.deployment.compose.stack import (
    DOWN_SECONDS,
    GRPC_PORT,
    HTTP_PORT,
    MAP_PORT,
    ROOT,
    SERVICES,
    START_SECONDS,
    Stack,
    inspect,
    run,
)
from tests.deployment.dashboard import AFTER_FAULTS, ON_DEMAND, dashboards, queries
from tests.deployment.prometheus import ALERTS, RunningPrometheus
from tests.load import prompt_request, run_streams
from tests.running_quire import CALL_SECONDS, Answer, open_channel

STREAMS = 16
MIN_SCRAPES = 8  # while requests run: rates are taken over some of them
PINNED = ("constraints.txt", "deploy/image/constraints.txt")
INSTALLED = "import importlib.metadata as m; [print(d.name, d.version.split('+')[0]) for d in m.distributions()]"

pytestmark = pytest.mark.timeout(3600)


class Plain(Stack):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.channel = open_channel("127.0.0.1:50051")
        self.gateway = gateway_pb2_grpc.GatewayStub(self.channel)

    def generate(self, request: gateway_pb2.GenerateRequest) -> Answer:
        return Answer.of(self.gateway.Generate(request, timeout=CALL_SECONDS))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plain]:
    plain = Plain(tmp_path_factory.mktemp("stack"))
    plain.up()
    yield plain
    plain.channel.close()
    plain.down()


def test_each_service_waits_for_its_dependencies(stack: Plain) -> None:
    """Compose does not order the gateway after engines, because it is not ready without one."""
    started = {service: inspect(stack.container(service))["State"]["StartedAt"] for service in SERVICES}
    assert started["kvmanager"] < min(started["engine"], started["gateway"])
    certificates = inspect(stack.container("certificates"))["State"]
    assert (certificates["ExitCode"], certificates["FinishedAt"] < started["kvmanager"]) == (0, True)


def test_a_request_from_outside_streams(stack: Plain) -> None:
    answer = stack.generate(prompt_request("The first thing a sailor learns is", 24))
    assert answer.events == ["started", *["delta"] * len(answer.deltas), "finished"]
    assert len(answer.deltas) > 12
    assert answer.finished.usage.generated_tokens == 24
    assert answer.started.model == "demo"


def test_the_command_of_the_readme_answers(stack: Plain) -> None:
    done = stack.run_inside("gateway", "quire", "generate", "--chat", "Why is the sky blue?", "--max-tokens", "8")
    assert done.returncode == 0
    assert len(done.stdout.split()) >= 3


@pytest.mark.parametrize("service", SERVICES)
def test_no_container_runs_as_root_or_writes_outside_its_volumes(stack: Plain, service: str) -> None:
    script = "for s in /proc/[0-9]*/status; do grep -h ^Uid $s; done"
    users = {line.split()[1] for line in stack.run_inside(service, "sh", "-c", script).stdout.splitlines()}
    assert users == {"10001"}
    for place in ("/", "/opt/quire", "/usr/bin", "/etc/quire/tls"):
        assert "Read-only file system" in stack.run_inside(service, "touch", f"{place}/x").stderr
    assert stack.run_inside(service, "touch", "/tmp/x").returncode == 0
    privileges = stack.run_inside(service, "grep", "-E", "^(CapEff|CapBnd|NoNewPrivs)", "/proc/1/status").stdout
    assert set(privileges.split()[1::2]) == {"0000000000000000", "1"}
    assert inspect(stack.container(service))["HostConfig"]["ReadonlyRootfs"]


def test_gateway_and_block_map_are_published_on_loopback_only(stack: Plain) -> None:
    published = {service: inspect(stack.container(service))["HostConfig"]["PortBindings"] or {} for service in SERVICES}
    ports = {"kvmanager": [MAP_PORT], "engine": [], "gateway": [GRPC_PORT, HTTP_PORT]}
    assert published == {
        service: {port: [{"HostIp": "127.0.0.1", "HostPort": port.split("/")[0]}] for port in own}
        for service, own in ports.items()
    }
    with urllib.request.urlopen("http://127.0.0.1:8053/", timeout=CALL_SECONDS) as page:
        assert b"<html" in page.read()


def test_the_gateway_answers_over_http_from_outside(stack: Plain) -> None:
    body = json.dumps({"prompt": "The sky is", "max_tokens": 4, "temperature": 0}).encode()
    request = urllib.request.Request("http://127.0.0.1:8000/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=CALL_SECONDS) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 4


def test_everything_in_the_image_is_pinned(stack: Plain) -> None:
    lines = "\n".join((ROOT / name).read_text() for name in PINNED)
    pinned = {_plain(name): number for name, number in re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", lines, re.MULTILINE)}
    found = run("docker", "run", "--rm", "--entrypoint", "python", "quire", "-c", INSTALLED).stdout.splitlines()
    installed = {_plain(name): number for name, number in (line.split() for line in found)}
    assert installed.pop("quire") == version("quire")
    installed.pop("pip")  # of the base image
    assert {f"{name}=={number}" for name, number in installed.items() if pinned.get(name) != number} == set()


def test_a_prometheus_that_scrapes_the_containers_has_data_for_every_query(
    stack: Plain, commands: Path, tmp_path: Path
) -> None:
    targets = {service: stack.metrics_addresses(service)[0] for service in SERVICES}
    prometheus = RunningPrometheus(commands, tmp_path, targets, {ALERTS.name: ALERTS.read_text()})
    try:
        prometheus.wait_until("count(up == 1) == 3")
        start = time.time()
        requests = [prompt_request(f"Sailor number {number} wrote", 64) for number in range(STREAMS)]
        while not prometheus.query(f"count_over_time(up[{math.ceil(time.time() - start)}s]) >= {MIN_SCRAPES}"):
            run_streams(stack, requests, STREAMS)
        prometheus.wait_until("quire:errors:ratio_rate5m")  # needs a scrape after the end of a request
        end = start + math.ceil(time.time() - start)  # ranges are evaluated every second from `start` on
        expressions = [query for query in queries() if not query.needs(*AFTER_FAULTS, *ON_DEMAND)]
        empty = [query for query in expressions if not prometheus.query_range(query.executable(), start, end)]
        assert empty == []
        off = "sum by (engine, tier) (quire_kv_blocks) != on (engine, tier) quire_kv_pool_blocks"
        assert prometheus.query_range(off, start, end) == []
        assert prometheus.query_range("up != 1", start, end) == []
    finally:
        prometheus.close()


def test_prometheus_and_grafana_of_the_stack_have_the_dashboards_and_alerts(stack: Plain) -> None:
    monitoring = ("prometheus", "grafana")
    stack.compose("pull", *monitoring, seconds=600)
    for image in re.findall(r"image: (\S+:v?\d\S+)", (ROOT / "docker-compose.yml").read_text()):
        if run("docker", "image", "inspect", image).returncode:
            pytest.skip(f"needs the image {image}, and no registry with it can be reached")
    stack.succeed("up", "--detach", *monitoring, seconds=START_SECONDS)
    _wait_for("http://127.0.0.1:9090/api/v1/query?query=count(up==1)", '"3"')
    _wait_for("http://127.0.0.1:9090/api/v1/rules?type=alert", "QuireNoGateway")
    for board in dashboards():
        _wait_for(f"http://127.0.0.1:3000/api/dashboards/uid/{board.uid}", board.panels[-1].title)


def test_compose_down_finishes_running_requests_and_every_service_exits_with_0(stack: Plain) -> None:
    exits = {
        service: subprocess.Popen(["docker", "wait", stack.container(service)], stdout=subprocess.PIPE, text=True)
        for service in SERVICES
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
    stack.succeed("down", seconds=DOWN_SECONDS)
    client.join(CALL_SECONDS)
    assert answer.finished.usage.generated_tokens == 100
    assert {service: process.communicate()[0].strip() for service, process in exits.items()} == dict.fromkeys(
        SERVICES, "0"
    )
    assert stack.compose("ps", "--quiet").stdout == ""


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


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
        time.sleep(1)  # the API has no notifications
