"""The image's health check, run as process 1's command line and environment say."""

import asyncio
import os
import socket
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from services.runtime.metrics.page import Exposition
from services.runtime.metrics.server import metrics_server
from services.runtime.service import Readiness

SCRIPT = Path(__file__).parents[2] / "deploy" / "image" / "healthcheck.sh"
# What `/proc/1/cmdline` shows of the command `quire`.
QUIRE = ("/opt/quire/bin/python", "/opt/quire/bin/quire")

pytestmark = pytest.mark.anyio


async def check(folder: Path, *command: str, **environment: str) -> tuple[int | None, str]:
    """Run the check for a process 1 with this command line; return status and output."""
    line = folder / "cmdline"
    line.write_bytes(b"".join(word.encode() + b"\0" for word in command))
    variables = {"PATH": f"{folder}:{os.environ['PATH']}", "HEALTHCHECK_COMMAND_LINE": str(line), **environment}
    process = await asyncio.create_subprocess_exec(
        SCRIPT, env=variables, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    return process.returncode, output.decode()


async def test_follows_the_readiness_at_the_address_of_the_option(tmp_path: Path) -> None:
    readiness = Readiness()
    async with metrics_server(Exposition(CollectorRegistry(), "127.0.0.1:0"), readiness) as url:
        command = (*QUIRE, "engine", "--model", "demo", "--metrics-listen", url.split("/")[2])
        assert await check(tmp_path, *command) == (1, "engine is not ready: 503\n")
        readiness.set(True)
        assert await check(tmp_path, *command) == (0, "")


@pytest.mark.parametrize(
    ("command", "variable"),
    [
        ((*QUIRE, "gateway"), "QUIRE_GATEWAY_METRICS_LISTEN"),
        (("/sbin/docker-init", "--", *QUIRE, "kvmanager"), "QUIRE_KVMANAGER_METRICS_LISTEN"),
        ((*QUIRE, "serve", "--model", "engine"), "QUIRE_SERVE_METRICS_LISTEN"),
    ],
)
async def test_finds_any_address_of_this_container_in_the_environment(
    tmp_path: Path, command: tuple[str, ...], variable: str
) -> None:
    readiness = Readiness()
    readiness.set(True)
    async with metrics_server(Exposition(CollectorRegistry(), "0.0.0.0:0"), readiness) as url:
        assert await check(tmp_path, *command, **{variable: url.split("/")[2]}) == (0, "")


async def test_without_a_metrics_listener_it_asks_over_grpc(tmp_path: Path) -> None:
    quire = tmp_path / "quire"
    quire.write_text("#!/bin/sh\necho $*\nexit 1\n")
    quire.chmod(0o755)
    command = (*QUIRE, "engine", "--metrics-listen=")
    found = await check(tmp_path, *command, QUIRE_ENGINE_LISTEN="[::]:7000")
    assert found == (1, "health [::1]:7000 --service quire.v1.Engine --timeout 4\n")


async def test_a_service_that_does_not_listen_is_not_ready(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free = f"127.0.0.1:{listener.getsockname()[1]}"
    status, output = await check(tmp_path, *QUIRE, "kvmanager", QUIRE_KVMANAGER_METRICS_LISTEN=free)
    assert status == 1
    assert "Connection refused" in output


@pytest.mark.parametrize("command", [(*QUIRE, "certificates", "create"), ("/pause",), ("sh", "-c", "engine")])
async def test_a_container_without_a_service_has_nothing_to_check(tmp_path: Path, command: tuple[str, ...]) -> None:
    assert await check(tmp_path, *command) == (0, "")
