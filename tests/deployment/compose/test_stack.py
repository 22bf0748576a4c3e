"""The stack as the README starts it, one of each service and no TLS: `make compose-check`. It needs a Docker daemon."""

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
from tests.deployment.compose.report import Report
from tests.deployment.compose.stack import (
    DEPLOY,
    DOWN_SECONDS,
    GRPC_PORT,
    HTTP_PORT,
    MAP_PORT,
    README,
    ROOT,
    SERVICES,
    Stack,
    compose_commands,
    docker,
    inspect,
    log_of,
    missing_images,
    run,
)
from tests.deployment.dashboard import ON_DEMAND, dashboards, queries
from tests.deployment.prometheus import ALERTS, RunningPrometheus
from tests.load import prompt_request, run_streams
from tests.running_quire import CALL_SECONDS, Answer, open_channel

STREAMS = 16
MIN_SCRAPES = 8  # while requests run: rates are taken over some of them
PINNED = ("constraints.txt", "deploy/image/constraints.txt")
INSTALLED = "import importlib.metadata as m; [print(d.name, d.version.split('+')[0]) for d in m.distributions()]"

RFC_3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
MEMORY = {"kvmanager": 2, "engine": 8, "gateway": 2}  # GiB, of .env
CGROUP_FILES = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of both versions
PROCESSORS = {"kvmanager": 2, "engine": 0, "gateway": 2}
CHECKS = 10
MOST_CHECK_MILLISECONDS = 50  # of CPU; a Python process of Quire's takes several hundred

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
    plain.copy_source()
    (start,) = compose_commands(README)
    plain.follow(start)
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


def test_the_commands_of_the_pages_answer(stack: Plain) -> None:
    """The stack was started by the README's; the first of the page on deployment is the same."""
    start, ask = compose_commands(DEPLOY)
    assert [start] == compose_commands(README)
    assert ask[:4] == ["exec", "gateway", "quire", "generate"]
    assert len(stack.follow(ask).split()) >= 3


@pytest.mark.parametrize("service", SERVICES)
def test_containers_have_the_limits_of_the_variables(stack: Plain, service: str) -> None:
    limits = inspect(stack.container(service))["HostConfig"]
    assert limits["Memory"] == MEMORY[service] << 30
    assert limits["NanoCpus"] == PROCESSORS[service] * 10**9
    assert limits["PidsLimit"] == 4096
    assert stack.run_inside(service, "cat", *CGROUP_FILES).stdout == f"{MEMORY[service] << 30}\n"


@pytest.mark.parametrize("service", SERVICES)
def test_every_line_of_a_log_is_json_with_time_and_level(stack: Plain, service: str) -> None:
    lines = [json.loads(line) for line in log_of(stack.container(service)).splitlines()]
    assert lines
    assert all(RFC_3339.fullmatch(line["time"]) and line["level"] and line["service"] == service for line in lines)


@pytest.mark.parametrize(
    ("arguments", "status", "reason"),
    [
        (("engine", "--no-such-option"), "2", "No such option '--no-such-option'"),
        (("kvmanager", "--listen", "unix:/no/folder"), "1", "cannot listen on unix:/no/folder"),
    ],
)
def test_a_service_that_cannot_start_says_why_as_json(arguments: tuple[str, ...], status: str, reason: str) -> None:
    container = docker("run", "--detach", "quire", *arguments).strip()
    try:
        assert docker("wait", container).strip() == status
        lines = [json.loads(line) for line in log_of(container).splitlines()]
    finally:
        docker("rm", "--force", container)
    assert {line["service"] for line in lines} == {arguments[0]}
    assert reason in lines[-1]["message"]


def test_a_health_check_costs_a_hundredth_of_a_python_process(stack: Plain, report: Report) -> None:
    cheap = {service: _milliseconds(stack, service, "quire-healthcheck") for service in SERVICES}
    before = _milliseconds(stack, "gateway", "quire health 127.0.0.1:50051")
    report.facts.append(
        f"CPU of a health check: {max(cheap.values()):.0f} ms; of `quire health`, which it replaced: {before:.0f} ms"
    )
    assert max(cheap.values()) < MOST_CHECK_MILLISECONDS


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
        expressions = [query for query in queries() if not query.needs(*ON_DEMAND)]
        empty = [query for query in expressions if not prometheus.query_range(query.executable(), start, end)]
        assert empty == []
        off = "sum by (engine, tier) (quire_kv_blocks) != on (engine, tier) quire_kv_pool_blocks"
        assert prometheus.query_range(off, start, end) == []
        assert prometheus.query_range("up != 1", start, end) == []
    finally:
        prometheus.close()


def test_prometheus_and_grafana_of_the_stack_have_the_dashboards_and_alerts(stack: Plain) -> None:
    if missing_images():
        pytest.skip(f"needs the image {missing_images()[0]}, and no registry with it can be reached")
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


def _milliseconds(stack: Plain, service: str, check: str) -> float:
    """Return the CPU of one check in a service's container, the mean of some."""
    script = f"for i in $(seq {CHECKS}); do {check} >/dev/null || exit 1; done; times"
    done = stack.run_inside(service, "bash", "-c", script)
    assert done.returncode == 0, done.stdout + done.stderr
    children = re.findall(r"(\d+)m([\d.]+)s", done.stdout)[2:]
    return sum(60_000 * int(minutes) + 1000 * float(seconds) for minutes, seconds in children) / CHECKS


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
