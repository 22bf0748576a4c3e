"""The first commands of the README work in a new clone."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.acceptance.conftest import ROOT, Record
from tests.running_quire import CALL_SECONDS, START_SECONDS, STOP_SECONDS, Output

INSTALL_SECONDS = 1800
# Kept, because they configure this machine's access to package indexes.
OF_THE_NETWORK = ("PIP_", "SSL_", "REQUESTS_", "CURL_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
LISTENING = {
    "QUIRE_SERVE_LISTEN": "127.0.0.1:0",
    "QUIRE_SERVE_HTTP_LISTEN": "127.0.0.1:0",
    "QUIRE_SERVE_MAP_LISTEN": "127.0.0.1:0",
    "QUIRE_SERVE_METRICS_LISTEN": "127.0.0.1:0",
}


class Newcomer:
    """A clone, and commands in it with an empty environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "quire"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(self.folder)], check=True)
        (folder / "home").mkdir()
        network = {name: value for name, value in os.environ.items() if name.upper().startswith(OF_THE_NETWORK)}
        path = "/usr/local/bin:/usr/bin:/bin"
        # The default ports may be in use by other tests.
        self._environment = {"HOME": str(folder / "home"), "PATH": path, "LANG": "C.UTF-8", **network, **LISTENING}

    def begin(self, command: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            ["bash", "-c", command],
            cwd=self.folder,
            env={**self._environment, "QUIRE_RUNTIME": str(self.folder.parent / "home" / "runtime")},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, command: str, seconds: float = CALL_SECONDS) -> str:
        process = self.begin(command)
        printed, _ = process.communicate(timeout=seconds)
        assert process.returncode == 0, printed
        return printed


@pytest.fixture
def newcomer(tmp_path: Path) -> Newcomer:
    return Newcomer(tmp_path)


def test_the_first_commands_of_the_readme_work_in_an_empty_clone(newcomer: Newcomer, record: Record) -> None:
    begun = time.monotonic()
    assert "All three services have stopped." in newcomer.run("make demo", INSTALL_SECONDS)
    demo_seconds, begun = time.monotonic() - begun, time.monotonic()
    serving = newcomer.begin("make serve")
    output = Output(serving)
    try:
        output.wait_for("serve     | ready: gateway at ", START_SECONDS)
        serve_seconds, begun = time.monotonic() - begun, time.monotonic()
        answer = newcomer.run('.venv/bin/quire generate --chat "Why is the sky blue?"')
        record(demo_seconds=demo_seconds, serve_seconds=serve_seconds, generate_seconds=time.monotonic() - begun)
        (name,) = re.findall(r", request (\w+)$", answer, re.MULTILINE)
        assert "It finished" in newcomer.run(f".venv/bin/quire explain {name}")
        assert re.fullmatch(r"SERVING\ndemo: \w+, weights \w+ on \S+\n", newcomer.run(".venv/bin/quire health"))
    finally:
        os.killpg(serving.pid, signal.SIGINT)
        serving.wait(STOP_SECONDS)
    output.finish()
    assert [line for line in output.lines if "Traceback" in line] == []
