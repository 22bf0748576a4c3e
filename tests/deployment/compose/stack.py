"""The project's stack, run by docker compose from a copy of its files."""

import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from services.runtime.ports import ENGINE, GATEWAY, KVMANAGER

ROOT = Path(__file__).parents[3]
PROJECT = "quire-check"
SERVICES = ("kvmanager", "engine", "gateway")
METRICS_PORTS = {"gateway": GATEWAY.metrics, "engine": ENGINE.metrics, "kvmanager": KVMANAGER.metrics}
GRPC_PORT, HTTP_PORT, MAP_PORT = f"{GATEWAY.grpc}/tcp", f"{GATEWAY.http}/tcp", f"{KVMANAGER.http}/tcp"
MONITORING = ("prometheus", "grafana")
# Pages whose commands of docker compose are run as they stand there.
README, DEPLOY = ROOT / "README.md", ROOT / "docs" / "deploy.md"
BUILD_SECONDS, START_SECONDS, DOWN_SECONDS = 1800, 900, 120
# The files that docker compose reads. Others in these folders, such as the user's keys, are not copied.
_FILES = ("docker-compose.yml", ".env", "deploy/compose/settings/*", "deploy/compose/tls/*")
_FILES += ("deploy/compose/api_keys/o*.env",)
_FILES += ("deploy/compose/api_keys/off.toml", "deploy/compose/*.sh", "deploy/prometheus/*", "deploy/grafana/**/*")
_FILES += ("helm/quire/dashboards/*", "deploy/smg/*")

Run = subprocess.CompletedProcess[str]


def run(*command: str, seconds: float = 60, folder: Path = ROOT, environment: Mapping[str, str] | None = None) -> Run:
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )


def docker(*arguments: str, seconds: float = 60) -> str:
    """Run docker; return its output. Fails the test on an error."""
    done = run("docker", *arguments, seconds=seconds)
    assert done.returncode == 0, f"docker {' '.join(arguments)}: {done.stderr}"
    return done.stdout


@cache
def compose_command() -> tuple[str, ...]:
    """Return `docker compose`, or `docker-compose` if the plugin is missing."""
    return ("docker", "compose") if run("docker", "compose", "version").returncode == 0 else ("docker-compose",)


@cache
def missing_images() -> list[str]:
    """Return the images of the file that are neither here nor at a registry that can be reached."""
    named = re.findall(r"image: (\S+:v?\d\S+)", (ROOT / "docker-compose.yml").read_text())
    return [one for one in named if not _can_get(one)]


@cache
def base_image() -> str:
    """Return the base of builds: the one with the digest, or this machine's of that tag if no registry answers."""
    if given := os.environ.get("PYTHON_IMAGE"):
        return given
    base = re.search(r"^ARG PYTHON_IMAGE=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)[1]  # type: ignore[index]
    return base if _can_get(base) else base.partition("@")[0]


def _can_get(image: str) -> bool:
    found = run("docker", "image", "inspect", image).returncode == 0
    return found or run("docker", "pull", "--quiet", image, seconds=BUILD_SECONDS).returncode == 0


def compose_commands(page: Path) -> list[list[str]]:
    """Return the arguments of the commands of docker compose that stand alone on a line of a page."""
    lines = re.findall(r"^docker compose (.+)$", page.read_text(), re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


@cache
def takes_port_ranges() -> bool:
    """Return True if containers of one service can share a range of ports: Podman accepts no ranges."""
    return "podman" not in docker("version").lower()


class Stack:
    """The stack in a separate folder, with values for the variables of .env."""

    def __init__(self, folder: Path, override: str = "", **variables: str) -> None:
        """Copy the files; `override` becomes docker-compose.override.yml."""
        self.folder = folder
        for pattern in _FILES:
            for path in ROOT.glob(pattern):
                if path.is_file():
                    copy = folder / path.relative_to(ROOT)
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy(path, copy)
        if override:
            (folder / "docker-compose.override.yml").write_text(override)
        others = {name: value for name, value in os.environ.items() if not name.startswith(("QUIRE_", "COMPOSE_"))}
        self.environment = others | {"COMPOSE_PROJECT_NAME": PROJECT, "PYTHON_IMAGE": base_image()} | variables

    def compose(self, *arguments: str, seconds: float = 60) -> Run:
        return run(*compose_command(), *arguments, seconds=seconds, folder=self.folder, environment=self.environment)

    def succeed(self, *arguments: str, seconds: float = 60) -> str:
        done = self.compose(*arguments, seconds=seconds)
        assert done.returncode == 0, f"compose {' '.join(arguments)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    def up(self) -> None:
        """Start Quire's services, and wait until all health checks pass."""
        self.succeed("up", "--detach", "--no-build", *SERVICES, seconds=START_SECONDS)
        for service in SERVICES:
            self.wait_until_healthy(service)

    def follow(self, arguments: list[str]) -> str:
        """Run a command of a page as it is; for docker-compose 1.29, do what its two options of today do.

        Monitoring is left out where its images cannot be had.
        """
        kept = list(arguments)
        old = compose_command() == ("docker-compose",)
        if old and kept[0] == "exec":
            kept.insert(1, "-T")
        wait = old and "--wait" in kept
        if wait:
            kept.remove("--wait")
        if missing_images():
            self.environment["COMPOSE_PROFILES"] = "cpu"
        output = self.succeed(*kept, seconds=BUILD_SECONDS)
        if wait:
            for service in SERVICES:
                self.wait_until_healthy(service)
        return output

    def copy_source(self) -> None:
        """Copy all files of the project, so that the image can be built from the copy."""
        for name in run("git", "ls-files", "-z").stdout.split("\0"):
            if name and (ROOT / name).is_file():
                copy = self.folder / name
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, copy)

    def down(self, *, volumes: bool = False) -> None:
        options = ("--volumes",) if volumes else ()
        self.succeed("down", "--remove-orphans", *options, seconds=DOWN_SECONDS)

    def containers(self, service: str) -> list[str]:
        return self.compose("ps", "--quiet", service).stdout.split()

    def running(self) -> list[str]:
        """Return all running containers of the stack."""
        return docker("ps", "--quiet", "--filter", f"label=com.docker.compose.project={PROJECT}").split()

    def container(self, service: str) -> str:
        return self.containers(service)[0]

    def wait_until_healthy(self, service: str, seconds: float = START_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        for container in self.containers(service):
            while (status := inspect(container)["State"]["Health"]["Status"]) != "healthy":
                assert time.monotonic() < deadline, f"{service} is {status}: {docker('logs', container)}"
                time.sleep(1)  # Docker sends no health notifications

    def run_inside(self, service: str, *command: str, **variables: str) -> Run:
        """Run a command in a container, with additional environment variables."""
        given = [part for name, value in variables.items() for part in ("--env", f"{name}={value}")]
        return run("docker", "exec", *given, self.container(service), *command)

    def published(self, port: str) -> list[str]:
        """Return the published address of each gateway's port."""
        bound = [inspect(one)["NetworkSettings"]["Ports"][port][0] for one in self.containers("gateway")]
        return [f"{place['HostIp']}:{place['HostPort']}" for place in bound]

    def metrics_addresses(self, service: str) -> list[str]:
        """Return the metrics addresses of a service's containers, which are reachable from this machine."""
        addresses = []
        for container in self.containers(service):
            (network,) = inspect(container)["NetworkSettings"]["Networks"].values()
            addresses.append(f"{network['IPAddress']}:{METRICS_PORTS[service]}")
        return addresses


def inspect(container: str) -> dict[str, Any]:
    return json.loads(docker("inspect", container))[0]


def log_of(container: str) -> str:
    done = run("docker", "logs", container)
    return done.stdout + done.stderr


def image_label(name: str) -> str:
    labels = json.loads(docker("image", "inspect", "quire", "--format", "{{json .Config.Labels}}"))
    return str(labels[f"org.opencontainers.image.{name}"])
