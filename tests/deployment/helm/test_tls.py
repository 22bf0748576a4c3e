"""TLS of the chart: its renders, and services that run with them."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api_keys import write_keys
from tests.certificates import Authority
from tests.deployment.helm.chart import (
    CI_VALUES,
    HEALTH,
    PORTS,
    ROOT,
    TYPES,
    Object,
    by_name,
    ci,
    containers,
    main_container,
    merged,
    of_kind,
    only,
    pod_of,
    pods,
    render,
    render_ci,
    service_container,
    settings_of,
    variables,
    volumes,
)
from tests.running_quire import CALL_SECONDS, STOP_SECONDS, Output, launch

WITH_TLS = [name for name in CI_VALUES if ci(name).get("tls", {}).get("enabled")]
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
KEY = "quire-0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize("name", WITH_TLS)
@pytest.mark.parametrize("component", TYPES)
def test_every_port_speaks_tls_and_every_link_shows_a_certificate(
    component: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(pod_of(render_ci(name), component), monkeypatch, component)
    assert settings.tls_certificate
    assert settings.tls_key
    if component != "gateway":
        assert settings.tls_client_ca == "/etc/quire-tls/ca.crt"
        assert not settings.insecure
    if component != "kvmanager":
        assert settings.link_ca == "/etc/quire-tls/ca.crt"
        assert settings.link_certificate == "/etc/quire-tls/tls.crt"
        assert settings.link_server_name == ci(name)["tls"].get("serverName", "blue-quire.llm.svc")


@pytest.mark.parametrize("name", WITH_TLS)
def test_every_file_of_tls_is_in_a_secret_that_is_mounted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for pod in pods(render_ci(name)).values():
        settings = settings_of(pod, monkeypatch)
        mounted = {path: volume["secret"] for path, volume in volumes(pod).items() if "secret" in volume}
        for setting in ("tls_certificate", "tls_key", "tls_client_ca", "link_ca", "link_certificate", "link_key"):
            if path := getattr(settings, setting, ""):
                folder, _, file = path.rpartition("/")
                assert mounted[folder]["defaultMode"] == 0o440
                assert file in ("tls.crt", "tls.key", "ca.crt")


def test_cert_manager_certificates_cover_mounted_secrets_and_called_names() -> None:
    rendered = render_ci("tls")
    certificates = {name: item["spec"] for name, item in by_name(rendered, "Certificate").items()}
    assert sorted(certificates) == sorted(TYPES)
    for name, spec in certificates.items():
        assert volumes(pods(rendered)[name])["/etc/quire-tls"]["secret"]["secretName"] == spec["secretName"]
        assert {"blue-quire.llm.svc", f"blue-quire-{name}", f"blue-quire-{name}.llm.svc"} <= set(spec["dnsNames"])
        assert {"server auth", "client auth"} <= set(spec["usages"])
        assert spec["issuerRef"] == {"name": "quire", "kind": "Issuer", "group": "cert-manager.io"}
    assert ["llm.example.org" in certificates[name]["dnsNames"] for name in TYPES] == [False, False, True]
    assert of_kind(render_ci("mutual-tls"), "Certificate") == []


@pytest.mark.parametrize("name", WITH_TLS)
def test_probes_ask_the_metrics_listener_because_kubernetes_own_have_no_tls(name: str) -> None:
    for container in containers(render_ci(name)).values():
        ports = {one["name"].removeprefix("kv-"): one["containerPort"] for one in container["ports"]}
        for probe in PROBES:
            path = "/ready" if probe == "readinessProbe" else "/live"
            assert container[probe]["httpGet"] == {"path": path, "port": ports["metrics"]}
            assert container[probe].keys() & {"grpc", "exec"} == set()
            assert container[probe]["timeoutSeconds"] == 3


def test_the_pod_of_helm_test_has_a_private_key_only_if_the_gateway_requires_certificates() -> None:
    def keys(name: str) -> list[str]:
        (volume,) = [one for one in only(render_ci(name), "Pod")["spec"]["volumes"] if one["name"] == "tls"]
        return [item["key"] for item in volume["secret"]["items"]]

    assert keys("tls") == ["tls.crt"]
    assert keys("mutual-tls") == ["tls.crt", "tls.key"]


# Run


@dataclass
class Deployed:
    """Services of a render as local processes, with folders for Secrets and the actual addresses for Services."""

    objects: list[Object]
    secrets: dict[str, Path]
    other_values: dict[str, str]
    addresses: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, str] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)

    def start(self, component: str) -> None:
        pod = pod_of(self.objects, component)
        container = service_container(pod, component)
        # Only with the container's own mounts.
        pod = {"spec": {**pod["spec"], "containers": [container]}}
        environment = {name: self._localized(value, pod) for name, value in variables(container).items()}
        self.processes[component] = process = launch(*container["args"], **{**environment, **self.other_values})
        output = Output(process)
        self.metrics[component] = output.wait_for(f"{component} shows its metrics at ").rpartition(" ")[2]
        address = output.wait_for(f"{component} listens on ").split(" on ")[1]
        port = PORTS[component]["grpc"]
        self.addresses |= {
            f"dns:blue-quire-{component}:{port}": address,
            f"blue-quire-{component}:{port}": address,
            f"127.0.0.1:{port}": address,
        }

    def _localized(self, value: str, pod: Object) -> str:
        """Replace paths and addresses in a variable or argument by local ones."""
        local = {**{path: str(folder) for path, folder in self._mounts(pod).items()}, **self.addresses}
        value = re.sub("|".join(map(re.escape, local)) or "$^", lambda found: local[found[0]], value)
        return "127.0.0.1:0" if value.startswith("0.0.0.0:") else value

    def _mounts(self, pod: Object) -> dict[str, Path]:
        secrets = {one["name"]: one["secret"]["secretName"] for one in pod["spec"]["volumes"] if "secret" in one}
        mounts = [mount for container in pod["spec"]["containers"] for mount in container["volumeMounts"]]
        return {
            mount["mountPath"]: self.secrets[secrets[mount["name"]]] for mount in mounts if mount["name"] in secrets
        }

    def run(self, arguments: list[str], pod: Object, **environment: str) -> "subprocess.CompletedProcess[str]":
        """Run `quire` with the arguments of a container or a probe of the pod."""
        command = [sys.executable, "-m", "services.cli.main", *(self._localized(one, pod) for one in arguments)]
        environment = {name: self._localized(value, pod) for name, value in environment.items()}
        return subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    def close(self) -> None:
        with ExitStack() as ends:  # in reverse order, and all of them even after a failure
            for process in self.processes.values():
                ends.callback(_end, process)


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(timeout=STOP_SECONDS)
    finally:
        process.kill()


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder with the files of each Secret in mutual-tls-values.yaml."""
    folder = tmp_path_factory.mktemp("secrets")
    internal, public = Authority(folder, "internal"), Authority(folder, "public")
    secrets = {}
    for name, authority, host in (
        ("quire-kvmanager-certificate", internal, "quire.internal"),
        ("quire-engine-certificate", internal, "quire.internal"),
        ("quire-gateway-certificate", internal, "quire.internal"),
        ("quire-public-certificate", public, "llm.example.org"),
    ):
        certificate, key = authority.issue(name, host=host)
        secrets[name] = folder / f"{name}-secret"
        secrets[name].mkdir()
        for path, file in ((certificate, "tls.crt"), (key, "tls.key"), (authority.ca, "ca.crt")):
            (secrets[name] / file).write_bytes(path.read_bytes())
    secrets["quire-api-keys"] = folder / "keys"
    secrets["quire-api-keys"].mkdir()
    write_keys(secrets["quire-api-keys"] / "api_keys.toml", {KEY: 'tenant = "test"'})
    return secrets


@contextmanager
def deploy(values: Object, secrets: dict[str, Path], model: Path) -> Iterator[Deployed]:
    objects = render(merged(ci("mutual-tls"), {"test": {"apiKey": {"existingSecret": "quire-test-key"}}}, values))
    running = Deployed(
        objects, secrets, {"QUIRE_ENGINE_MODEL": str(model), "QUIRE_ENGINE_ENGINE_ID": "blue-quire-engine-0"}
    )
    try:
        for component in TYPES:
            running.start(component)
        yield running
    finally:
        running.close()


@pytest.fixture(scope="module")
def deployed(secrets: dict[str, Path], tiny_model: Callable[[str], Path]) -> Iterator[Deployed]:
    with deploy({}, secrets, tiny_model("llama")) as running:
        yield running


def assert_helm_test_passes(deployed: Deployed) -> None:
    pod = only(deployed.objects, "Pod")
    for container in pod["spec"]["containers"]:
        environment = {**variables(container), "QUIRE_API_KEY": KEY}
        done = until_ready(lambda: deployed.run(container["args"], pod, **environment))  # noqa: B023
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()


def test_the_services_start_with_the_charts_settings_and_helm_test_passes(deployed: Deployed) -> None:
    assert_helm_test_passes(deployed)


def test_helm_test_passes_with_a_kv_manager_beside_the_engine(
    secrets: dict[str, Path], tiny_model: Callable[[str], Path]
) -> None:
    with deploy({"kvmanager": {"placement": "engine"}}, secrets, tiny_model("llama")) as beside:
        assert_helm_test_passes(beside)


def until_ready(run: Callable[[], Any], seconds: float = 300) -> Any:
    """Repeat a command until it succeeds, as a probe does; return its last result."""
    deadline = time.monotonic() + seconds
    while True:
        done = run()
        if done.returncode == 0 or time.monotonic() > deadline:
            return done


@pytest.mark.parametrize("component", TYPES)
def test_the_probes_of_a_running_service_succeed(component: str, deployed: Deployed) -> None:
    container = main_container(pods(deployed.objects)[component])
    until_ready(lambda: deployed.run(health(component, deployed), pods(deployed.objects)[component]))
    for probe in PROBES:
        path = container[probe]["httpGet"]["path"]
        answer = httpx.get(deployed.metrics[component].replace("/metrics", path), timeout=CALL_SECONDS)
        assert answer.status_code == 200, probe


def health(component: str, deployed: Deployed) -> list[str]:
    """Return the arguments of a call with the service's own files."""
    folder = "/etc/quire-client-tls" if component == "gateway" else "/etc/quire-tls"
    name = "llm.example.org" if component == "gateway" else "quire.internal"
    port = PORTS[component]["grpc"]
    files = [f"--ca={folder}/ca.crt", f"--certificate={folder}/tls.crt", f"--private-key={folder}/tls.key"]
    return ["health", f"127.0.0.1:{port}", f"--service={HEALTH[component]}", f"--server-name={name}", *files]


@pytest.mark.parametrize("component", TYPES)
def test_a_client_without_a_certificate_is_refused(component: str, deployed: Deployed) -> None:
    pod = pods(deployed.objects)[component]
    arguments = health(component, deployed)
    assert until_ready(lambda: deployed.run(arguments, pod)).returncode == 0
    without = [one for one in arguments if not one.startswith(("--certificate", "--private-key"))]
    assert deployed.run(without, pod).returncode == 1
    plain = [one for one in without if not one.startswith(("--ca", "--server-name"))]
    assert deployed.run(plain, pod).returncode == 1
