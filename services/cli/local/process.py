"""One service as a child process: its output, its readiness, its end, and its restart."""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Protocol

from services.cli.options import arguments_of
from services.engine.settings import EngineSettings
from services.gateway.settings import GatewaySettings
from services.kvmanager.settings import KVManagerSettings
from services.runtime.child_process import READY_DESCRIPTOR, STOP_WITH_STDIN, python_command
from services.runtime.logs.records import message_of

# A service that does not stop within its own grace time and this is killed.
_SECONDS_BEYOND_GRACE = 10.0
# Bytes of a log line; a stack trace has some kilobytes.
_LONGEST_LINE = 1024 * 1024
_LONGEST_ADDRESS = 4096

ServiceSettings = KVManagerSettings | EngineSettings | GatewaySettings


class Print(Protocol):
    """Shows a line of a service, or about it, under its label; `level` is one of logging's."""

    def __call__(self, label: str, line: str, level: int = logging.INFO, /) -> None:
        """Show it."""


class ServiceProcess:
    """A service that can be restarted. `show` receives each of its output lines with its label."""

    def __init__(
        self,
        label: str,
        settings: ServiceSettings,
        metrics: str,
        show: Print,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Describe the process; it runs from `start` on.

        `metrics` is the address of its metrics, empty for none; `environment` is added to this process's.
        """
        self.label = label
        self.settings = settings
        self.address = ""  # its listening address, once it is ready
        self.ready = asyncio.Event()
        self._metrics = metrics
        self._show = show
        self._environment = environment
        self._ready_since = 0.0
        self._last_line = ""
        self._process: asyncio.subprocess.Process | None = None
        self._echo: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the process, which is ready later. It must not be running."""
        # A pipe, because a call to the service may need API keys and certificates that this process does not have.
        ready, is_ready = os.pipe()
        self.ready.clear()
        self._ready_since, self._last_line = 0.0, ""
        asyncio.get_running_loop().add_reader(ready, self._on_ready, ready)
        try:
            self._process = await self._spawn(is_ready)
        finally:
            os.close(is_ready)
        self._echo = asyncio.create_task(self._echo_lines(self._process))

    async def ended(self) -> float:
        """Wait for the end of the process; return the seconds for which it was ready."""
        assert self._process is not None, "it was started"
        assert self._echo is not None, "it was started"
        await self._process.wait()
        lasted = time.monotonic() - self._ready_since if self._ready_since else 0.0
        await asyncio.shield(self._echo)
        return lasted

    async def stop(self) -> None:
        """Let it finish its requests; kill it after its grace time."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), self.settings.grace_seconds + _SECONDS_BEYOND_GRACE)
        except TimeoutError:
            self._show(self.label, "did not stop in time and is killed", logging.WARNING)
            self._process.kill()
            await self._process.wait()
        if self._echo is not None:
            await self._echo

    @property
    def was_stopped(self) -> bool:
        """Whether it ended because somebody asked it to."""
        return self._process is not None and self._process.returncode == 0

    def exit_summary(self) -> str:
        """Return the exit status and the last line of output in one line."""
        status = self._process.returncode if self._process else None
        if status is not None and status < 0:
            return f"{self.label} was ended by {signal.Signals(-status).name}"
        if status == 0:
            return f"{self.label} was stopped"
        return f"{self.label} ended with status {status}: {self._last_line.rstrip('.')}"

    async def _spawn(self, is_ready: int) -> asyncio.subprocess.Process:
        command = type(self.settings).__name__.removesuffix("Settings").lower()
        return await asyncio.create_subprocess_exec(
            *python_command("-m", "services.cli.main", command, *arguments_of(self.settings)),
            *("--metrics-listen", self._metrics),
            # Never written to: it closes when this process ends, and then the service stops.
            stdin=asyncio.subprocess.PIPE,
            env={**os.environ, **self._environment, STOP_WITH_STDIN: "1", READY_DESCRIPTOR: str(is_ready)},
            pass_fds=(is_ready,),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            # Ctrl-C reaches the whole terminal's group; the order of stopping is decided here.
            start_new_session=True,
            limit=_LONGEST_LINE,
        )

    def _on_ready(self, ready: int) -> None:
        """Read the address of a ready service; empty if the service has ended."""
        if address := os.read(ready, _LONGEST_ADDRESS).decode().strip():
            self.address = address
            self._ready_since = time.monotonic()
            self.ready.set()
        asyncio.get_running_loop().remove_reader(ready)
        os.close(ready)

    async def _echo_lines(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None, "it was started with a pipe"
        while line := await _next_line(process.stdout):
            text = line.decode(errors="replace").rstrip()
            self._last_line = message_of(text) or self._last_line
            self._show(self.label, text)


async def _next_line(output: asyncio.StreamReader) -> bytes:
    """Return the next line, empty at the end. A line that is too long is replaced by a notice."""
    try:
        return await output.readline()
    except ValueError:
        return b"a line of more than %d bytes was lost\n" % _LONGEST_LINE
