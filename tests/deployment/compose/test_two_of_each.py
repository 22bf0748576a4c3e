"""Two engines and two gateways with TLS and API keys: access, and restarts without failed requests."""

import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import grpc
import pytest

from quire.v1 import gateway_pb2_grpc
from tests.api_keys import bearer, write_keys
from tests.deployment.compose.load import Load, Outcome, channel_to
from tests.deployment.compose.report import Report, Restart
from tests.deployment.compose.stack import GRPC_PORT, HTTP_PORT, Stack, docker, inspect, run, takes_port_ranges
from tests.faults import wait_until
from tests.load import prompt_request
from tests.running_quire import CALL_SECONDS, Answer
from tests.scrape import Scrape

KEY = "k" * 32
STREAMS, TOKENS = 8, 48
RESTART_SECONDS = 300
MANAGER_SECONDS = 10
TARGETS = 1 + 2 + 2  # of Prometheus
# Only in float32 are tokens the same in every batch. The short grace period makes running requests fail over.
OVERRIDE = """
services:
  engine:
    environment: { QUIRE_ENGINE_DTYPE: float32, QUIRE_ENGINE_GRACE_SECONDS: "0.5", QUIRE_ENGINE_THREADS: "1" }
"""
# Addresses and service names for `quire health`.
INSIDE = {"kvmanager": ("kvmanager:50053", "quire.v1.KVManager"), "engine": ("engine:50052", "quire.v1.Engine")}
NO_CERTIFICATE = {"QUIRE_CERTIFICATE": "", "QUIRE_PRIVATE_KEY": ""}

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    grpc_ports, http_ports = ("50051-50052", "8000-8001") if takes_port_ranges() else ("", "")
    two = Stack(
        tmp_path_factory.mktemp("stack"),
        OVERRIDE,
        QUIRE_ENGINES="2",
        QUIRE_GATEWAYS="2",
        QUIRE_GRPC_PORT=grpc_ports,
        QUIRE_HTTP_PORT=http_ports,
        QUIRE_TLS="on",
        QUIRE_API_KEYS="on",
    )
    write_keys(two.folder / "deploy/compose/api_keys/on.toml", {KEY: 'tenant = "acme"'})
    two.up()
    yield two
    two.down()


@pytest.fixture(scope="module")
def ca(stack: Stack) -> bytes:
    """The authority's certificate for clients, copied from a container."""
    docker("cp", f"{stack.container('gateway')}:/etc/quire/tls/ca.pem", str(stack.folder / "ca.pem"))
    return (stack.folder / "ca.pem").read_bytes()


@pytest.fixture(scope="module")
def load(stack: Stack, ca: bytes) -> Iterator[Load]:
    requests = [prompt_request(f"Sailor number {number} tells of the", TOKENS) for number in range(STREAMS)]
    with channel_to(stack.published(GRPC_PORT), ca) as channel:
        yield Load(channel, KEY, requests)


@pytest.fixture(scope="module")
def undisturbed(load: Load) -> list[Outcome]:
    return load.once()


def test_both_engines_have_a_pool_and_serve_with_unique_names(stack: Stack, undisturbed: list[Outcome]) -> None:
    (manager,) = [Scrape.of(f"http://{address}/metrics") for address in stack.metrics_addresses("kvmanager")]
    pools = manager.values("quire_kv_pool_blocks", "engine", tier="device")
    assert len(pools) == 2
    routed: dict[str, float] = dict.fromkeys(pools, 0)
    for address in stack.metrics_addresses("gateway"):
        for sample in Scrape.of(f"http://{address}/metrics").samples:
            if sample.name == "quire_routed_requests_total":
                routed[sample.labels["engine"]] += sample.value
    assert sum(routed.values()) >= STREAMS
    assert min(routed.values()) > 0, "one engine got no request"
    assert all(len(outcome.answer.token_ids) == TOKENS for outcome in undisturbed)


def test_prometheus_finds_every_container_by_the_projects_configuration(stack: Stack, commands: Path) -> None:
    """Runs this machine's Prometheus in a container on the stack's network, where names resolve to all containers."""
    (network,) = inspect(stack.container("gateway"))["NetworkSettings"]["Networks"]
    prometheus = docker(
        *("run", "--detach", "--rm", "--network", network, "--tmpfs", "/data:mode=1777"),
        *(
            "--volume",
            f"{commands / 'prometheus'}:/prometheus:ro",
            "--volume",
            f"{stack.folder}/deploy/prometheus:/etc/prometheus:ro",
        ),
        *("--entrypoint", "/prometheus", "quire", "--config.file=/etc/prometheus/prometheus.yml"),
        *("--storage.tsdb.path=/data", "--web.listen-address=0.0.0.0:9090"),
    ).strip()
    try:
        script = (
            "import json, sys, time, urllib.request\n"
            "url = 'http://127.0.0.1:9090/api/v1/query?query=count(up==1)'\n"
            "for _ in range(60):\n"
            "    try: found = json.load(urllib.request.urlopen(url))['data']['result']\n"
            "    except OSError: found = []\n"
            f"    if found and found[0]['value'][1] == '{TARGETS}': sys.exit(0)\n"
            "    time.sleep(1)\n"
            "sys.exit(f'Prometheus has {found}')\n"
        )
        done = run("docker", "exec", prometheus, "python", "-c", script, seconds=120)
        assert done.returncode == 0, done.stderr + docker("logs", prometheus)
    finally:
        docker("stop", prometheus)


def test_a_client_without_tls_or_without_a_key_is_refused(stack: Stack, ca: bytes) -> None:
    address, request = stack.published(GRPC_PORT)[0], prompt_request("The sky is", 4)
    with grpc.insecure_channel(address) as plain, pytest.raises(grpc.RpcError) as refused:
        Answer.of(gateway_pb2_grpc.GatewayStub(plain).Generate(request, timeout=CALL_SECONDS))
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
    with channel_to([address], ca) as channel:
        stub = gateway_pb2_grpc.GatewayStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            Answer.of(stub.Generate(request, timeout=CALL_SECONDS))
        assert refused.value.code() == grpc.StatusCode.UNAUTHENTICATED
        assert len(Answer.of(stub.Generate(request, timeout=CALL_SECONDS, metadata=bearer(KEY))).token_ids) == 4


@pytest.mark.parametrize("service", INSIDE)
def test_services_refuse_peers_without_a_certificate(stack: Stack, service: str) -> None:
    address, name = INSIDE[service]
    check = ("quire", "health", address, "--service", name, "--timeout", "3")
    assert stack.run_inside("gateway", *check).stdout.startswith("SERVING\n")
    for missing in (NO_CERTIFICATE, {**NO_CERTIFICATE, "QUIRE_CA": ""}):
        assert "UNAVAILABLE" in stack.run_inside("gateway", *check, **missing).stderr


@pytest.mark.parametrize("service", ["kvmanager", "engine", "gateway"])
def test_each_service_mounts_only_its_own_key(stack: Stack, service: str) -> None:
    listed = stack.run_inside(service, "sh", "-c", "cd /etc/quire && stat -c '%n %a %u' tls/* certificates/*/*").stdout
    assert sorted(listed.split("\n")) == [
        "",
        "tls/ca.pem 644 10001",
        "tls/certificate.pem 644 10001",
        "tls/key.pem 600 10001",
    ]


def test_renewed_certificates_are_used_without_a_restart(stack: Stack, ca: bytes, load: Load) -> None:
    place = stack.published(HTTP_PORT)[0]
    before, started = _serial(place, ca), inspect(stack.container("gateway"))["State"]["StartedAt"]
    renew = ("certificates", "renew", "/etc/quire/certificates", "--all")
    done = stack.succeed("run", "--rm", "certificates", *renew)
    assert all(f"{service}: until" in done for service in ("kvmanager", "engine", "gateway")), done
    # Services check for new files once a second.
    wait_until(lambda: _serial(place, ca) != before, "the gateway presents the renewed certificate")
    assert inspect(stack.container("gateway"))["State"]["StartedAt"] == started
    assert {len(outcome.answer.token_ids) for outcome in load.once()} == {TOKENS}


@pytest.mark.parametrize("service", ["engine", "kvmanager", "gateway"])
def test_a_rolling_restart_under_load_fails_no_request_and_changes_no_token(
    stack: Stack, load: Load, undisturbed: list[Outcome], report: Report, service: str
) -> None:
    before = {one: inspect(one)["State"]["StartedAt"] for one in stack.containers(service)}

    def restart() -> None:
        script = str(stack.folder / "deploy/compose/rolling_restart.sh")
        done = run(script, service, seconds=RESTART_SECONDS, folder=stack.folder, environment=stack.environment)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("is back") == len(before)

    outcomes = load.during(restart)
    assert all(inspect(one)["State"]["StartedAt"] != at for one, at in before.items())
    for one in outcomes:
        assert one.answer.token_ids == undisturbed[one.number].answer.token_ids
        assert one.answer.text == undisturbed[one.number].answer.text
    failovers = sum(one.failed_over for one in outcomes)
    assert (failovers > 0) == (service == "engine"), f"{failovers} streams failed over"
    report.restarts.append(
        Restart(
            service,
            len(before),
            requests=len(outcomes),
            tokens=sum(len(one.answer.token_ids) for one in outcomes),
            failed_over=failovers,
            longest_pause=max(one.longest_pause for one in outcomes),
            undisturbed_pause=max(one.longest_pause for one in undisturbed),
        )
    )


def test_the_manager_restarts_within_ten_seconds_under_load(
    stack: Stack, load: Load, undisturbed: list[Outcome], report: Report
) -> None:
    """It does not wait for its engines, which stay and attach to the new process."""
    seconds: list[float] = []

    def restart() -> None:
        began = time.monotonic()
        stack.succeed("restart", "kvmanager")
        seconds.append(time.monotonic() - began)
        stack.wait_until_healthy("kvmanager")

    outcomes = load.during(restart)
    assert seconds[0] < MANAGER_SECONDS
    assert all(one.answer.token_ids == undisturbed[one.number].answer.token_ids for one in outcomes)
    assert sum(one.failed_over for one in outcomes) == 0
    (manager,) = [Scrape.of(f"http://{address}/metrics") for address in stack.metrics_addresses("kvmanager")]
    assert len(manager.values("quire_kv_pool_blocks", "engine", tier="device")) == 2
    pause = max(one.longest_pause for one in outcomes)
    report.facts.append(
        f"`docker compose restart kvmanager` under load: {seconds[0]:.1f} s, {len(outcomes)} requests, none failed, "
        f"longest pause in a stream {pause:.1f} s"
    )


def _serial(place: str, ca: bytes) -> str:
    """Return the serial number of the certificate for a new connection."""
    host, port = place.rsplit(":", 1)
    context = ssl.create_default_context(cadata=ca.decode())
    with (
        closing(socket.create_connection((host, int(port)), timeout=CALL_SECONDS)) as connection,
        context.wrap_socket(connection, server_hostname="localhost") as encrypted,
    ):
        return str((encrypted.getpeercert() or {})["serialNumber"])
