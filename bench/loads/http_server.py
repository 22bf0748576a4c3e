"""A server with an OpenAI-compatible API as a process, which is stopped while it is not measured."""

import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

MODEL = "demo"
START_SECONDS = 600.0
_PROBE_SECONDS = 0.25
_REQUEST_SECONDS = 60.0
_STOP_SECONDS = 60.0
_LAST_SECONDS = 5.0  # for children that outlive the server


class HttpServer:
    """A running server and its child processes.

    They run only within a turn, because some servers keep cores busy when idle. The server must serve MODEL.
    """

    def __init__(
        self, command: Sequence[str], url: str, folder: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start it in a folder, which gets its log, and wait until it answers. Raises RuntimeError if it does not."""
        self.url = url
        self._log = folder / "server.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(  # a session of its own, because Ctrl-C must not reach it first
                command,
                cwd=folder,
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            self._wait_until_ready()
            self._suspend()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "HttpServer":
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    @contextmanager
    def turn(self) -> Iterator[str]:
        """Let it run, and yield its URL once it answers. Raises RuntimeError if it does not."""
        for one in self._processes():
            one.resume()
        try:
            self._wait_until_ready()
            yield self.url
        finally:
            self._suspend()

    def get(self, path: str) -> Any:
        """Return the JSON at a path; only within a turn."""
        with urllib.request.urlopen(self.url + path, timeout=_REQUEST_SECONDS) as response:
            return json.load(response)

    def log(self) -> str:
        """Return what it and its children have printed."""
        return self._log.read_text(errors="replace")

    def thread_seconds(self) -> dict[int, dict[int, float]]:
        """Return the CPU seconds so far of each thread, by process."""
        return {
            one.pid: {thread.id: thread.user_time + thread.system_time for thread in one.threads()}
            for one in self._processes()
        }

    def close(self) -> None:
        """Terminate it; kill what remains."""
        processes = self._processes()
        for one in processes:
            one.resume()
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _, alive = psutil.wait_procs(processes, _LAST_SECONDS)
        for one in alive:
            one.kill()
        psutil.wait_procs(alive, _LAST_SECONDS)

    def _processes(self) -> list[psutil.Process]:
        if self._process.poll() is not None:
            return []
        root = psutil.Process(self._process.pid)
        return [root, *root.children(recursive=True)]

    def _suspend(self) -> None:
        for one in self._processes():
            one.suspend()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not _completes(self.url):
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with {self._process.returncode}:\n{self._log_end()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"the server does not answer at {self.url}:\n{self._log_end()}")
            time.sleep(_PROBE_SECONDS)

    def _log_end(self) -> str:
        return "\n".join(self.log().splitlines()[-20:])


def free_address() -> str:
    """Return a local address that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def _completes(url: str) -> bool:
    """Return True if the server completes a request of one token."""
    body = json.dumps({"model": MODEL, "prompt": [1000], "max_tokens": 1}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=_REQUEST_SECONDS) as response:
            return bool(response.status == 200)
    except OSError:
        return False
