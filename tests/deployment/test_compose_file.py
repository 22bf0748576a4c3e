"""docker-compose.yml and its files, checked without a Docker daemon."""

import dataclasses
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.engine.settings import EngineSettings
from services.gateway.settings import GatewaySettings
from services.kvmanager.settings import KVManagerSettings
from services.models.model_store import DEMO_REQUIREMENT, DEMO_WHEELS
from tests.deployment.prometheus import CONFIGURATION

ROOT = Path(__file__).parents[2]
FILE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
OWN = ("certificates", "kvmanager", "engine", "engine-gpu", "gateway")
SETTINGS = {"KVMANAGER": KVManagerSettings, "ENGINE": EngineSettings, "GATEWAY": GatewaySettings}
# A variable and its default.
VARIABLE = re.compile(r"\$\{([A-Z_]+):?-([^}]*)\}")
SWITCHES = {"QUIRE_TLS": "deploy/compose/tls", "QUIRE_API_KEYS": "deploy/compose/api_keys"}


def variables_of(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def settings_with(tls: str, keys: str) -> dict[str, Any]:
    """Build the settings of all services from their containers' environment."""
    shared = variables_of(ROOT / SWITCHES["QUIRE_TLS"] / f"{tls}.env")
    shared |= variables_of(ROOT / SWITCHES["QUIRE_API_KEYS"] / f"{keys}.env")
    made = {}
    for name, kind in SETTINGS.items():
        given = shared | FILE["services"][name.lower()]["environment"]
        fields = {field.name: field for field in dataclasses.fields(kind)}
        own = {
            key.removeprefix(f"QUIRE_{name}_").lower(): str(value) for key, value in given.items() if f"_{name}_" in key
        }
        own.pop("metrics_listen")
        assert own.keys() <= fields.keys()
        made[name] = kind(
            **{key: value == "true" if isinstance(fields[key].default, bool) else value for key, value in own.items()}
        )
    return made


@pytest.mark.parametrize("service", OWN)
def test_every_container_of_the_image_is_locked_down(service: str) -> None:
    container = FILE["services"][service]
    assert container["read_only"]
    assert container["tmpfs"] == ["/tmp"]
    assert not {"privileged", "cap_add", "user", "pid", "network_mode"} & container.keys() or service == "certificates"
    assert container.get("network_mode", "none") == "none"


@pytest.mark.parametrize("service", FILE["services"])
def test_no_container_has_capabilities_or_new_privileges_or_a_public_port(service: str) -> None:
    container = FILE["services"][service]
    assert container["cap_drop"] == ["ALL"]
    assert container["security_opt"] == ["no-new-privileges:true"]
    assert all(port.startswith("127.0.0.1:") for port in container.get("ports", []))
    assert bool(container.get("ports")) == (service in ("kvmanager", "gateway", "prometheus", "grafana"))


@pytest.mark.parametrize("service", ["kvmanager", "engine", "engine-gpu", "gateway"])
def test_services_have_a_grace_period_and_health_checks(service: str) -> None:
    container = FILE["services"][service]
    kind = SETTINGS[service.split("-")[0].upper()]
    assert float(container["stop_grace_period"].removesuffix("s")) > kind().grace_seconds
    address, *rest = container["healthcheck"]["test"][3:]
    assert container["environment"][f"QUIRE_{service.split('-')[0].upper()}_LISTEN"].split(":")[1] in address
    assert rest in ([], ["--service", {"kvmanager": "quire.v1.KVManager"}.get(service, "quire.v1.Engine")])


def test_up_with_wait_returns_when_requests_are_served() -> None:
    """`--wait` waits for health checks, and for the exit of a container only if another depends on it."""
    waited_for = {
        name: needed["condition"]
        for service in FILE["services"].values()
        if isinstance(service.get("depends_on"), dict)
        for name, needed in service["depends_on"].items()
    }
    once = [name for name, service in FILE["services"].items() if service["restart"] == "no"]
    assert [waited_for[name] for name in once] == ["service_completed_successfully"] * len(once)
    assert {name for name in OWN if "healthcheck" not in FILE["services"][name]} == set(once)
    # The gateway's default service name is ready once an engine is.
    assert FILE["services"]["gateway"]["healthcheck"]["test"][1:] == ["quire", "health", "127.0.0.1:50051"]


def test_variables_have_the_same_defaults_in_the_file_of_variables() -> None:
    listed = variables_of(ROOT / ".env")
    assert listed.pop("COMPOSE_PROFILES") == FILE["services"]["engine"]["profiles"][0]
    found = dict(VARIABLE.findall((ROOT / "docker-compose.yml").read_text()))
    assert {name: value for name, value in found.items() if name.startswith("QUIRE_")} == listed


def test_cpu_and_gpu_engines_share_a_service_name_and_never_start_together() -> None:
    cpu, gpu = FILE["services"]["engine"], FILE["services"]["engine-gpu"]
    assert (cpu["profiles"], gpu["profiles"]) == (["cpu"], ["gpu"])
    assert gpu["networks"]["default"]["aliases"] == ["engine"]
    assert {key for key in gpu if gpu[key] != cpu.get(key)} == {
        *("profiles", "image", "build", "shm_size", "networks", "deploy")
    }
    assert gpu["build"]["args"].keys() == cpu["build"]["args"].keys()
    assert FILE["services"]["gateway"]["environment"]["QUIRE_GATEWAY_ENGINES"] == "dns:engine:50052"


@pytest.mark.parametrize("keys", ["off", "on"])
@pytest.mark.parametrize("tls", ["off", "on"])
def test_services_start_with_the_settings_of_every_switch(tls: str, keys: str) -> None:
    settings = settings_with(tls, keys)
    for one in settings.values():
        one.check_exposure()
    assert [bool(one.tls_certificate) for one in settings.values()] == [tls == "on"] * 3
    assert bool(settings["GATEWAY"].api_keys) == (keys == "on")
    assert [settings[name].insecure for name in SETTINGS] == [tls == "off", tls == "off", keys == "off"]


def test_with_tls_every_link_has_certificates_on_both_sides() -> None:
    settings = settings_with("on", "off")
    assert settings["KVMANAGER"].tls_client_ca == settings["ENGINE"].tls_client_ca == "/etc/quire/tls/ca.pem"
    assert settings["ENGINE"].link_ca == settings["GATEWAY"].link_ca == "/etc/quire/tls/ca.pem"
    for service in ("kvmanager", "engine", "engine-gpu", "gateway"):
        volume = f"{service.split('-')[0]}-certificates"
        assert f"{volume}:/etc/quire/tls:ro" in FILE["services"][service]["volumes"]
        assert (
            f"{volume}:/etc/quire/certificates/{service.split('-')[0]}" in FILE["services"]["certificates"]["volumes"]
        )


def test_prometheus_scrapes_the_metrics_ports() -> None:
    jobs = yaml.safe_load(CONFIGURATION.read_text())["scrape_configs"]
    scraped = {found["names"][0]: found["port"] for job in jobs for found in job["dns_sd_configs"]}
    shown = {
        name.lower(): FILE["services"][name.lower()]["environment"][f"QUIRE_{name}_METRICS_LISTEN"] for name in SETTINGS
    }
    assert {name: f"0.0.0.0:{port}" for name, port in scraped.items()} == shown


def test_the_restart_script_refuses_an_unknown_service_before_any_restart(tmp_path: Path) -> None:
    docker = tmp_path / "docker"
    docker.write_text(f"#!/bin/sh\necho $* >> {tmp_path}/calls\n")
    docker.chmod(0o755)
    script = ROOT / "deploy" / "compose" / "rolling_restart.sh"
    done = subprocess.run(
        [script, "prometheus"], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (2, "prometheus must be kvmanager, engine, engine-gpu or gateway\n")
    assert (tmp_path / "calls").read_text() == "compose version\n"


def test_every_dependency_of_quire_is_pinned() -> None:
    """Otherwise two builds of one source could have different images."""
    required = re.findall(
        r'^ {4}"([A-Za-z0-9-]+)', (ROOT / "pyproject.toml").read_text().partition("bench = [")[0], re.M
    )
    pins = "".join((ROOT / name).read_text() for name in ("constraints.txt", "deploy/image_constraints.txt"))
    assert len(required) > 10
    assert [name for name in required if not re.search(rf"^{name}==", pins, re.M | re.I)] == []


def test_the_image_contains_the_demo_model_that_the_source_names() -> None:
    assert DEMO_REQUIREMENT in (ROOT / "deploy" / "image_constraints.txt").read_text().splitlines()
    dockerfile = (ROOT / "Dockerfile").read_text()
    folder = re.search(rf"{DEMO_WHEELS}=(\S+)", dockerfile)[1]
    assert f"--dest {folder} {DEMO_REQUIREMENT.partition('==')[0]};" in dockerfile
