"""Runs the three services as processes, over Unix sockets, and stops them in order."""

import asyncio
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from services.cli.options import arguments_of
from services.cli.run_service import READY_DESCRIPTOR, STOP_WITH_STDIN
from services.engine.settings import EngineSettings
from services.gateway.settings import GatewaySettings
from services.kvmanager.settings import KVManagerSettings

# A service that does not stop within its own grace time and this is killed.
_SECONDS_BEYOND_GRACE = 10.0
_LAST_PORT = 65535
# Of what a service logs. A stack has some kilobytes.
_LONGEST_LINE = 1024 * 1024

Print = Callable[[str, str], None]


def metrics_addresses(first: str) -> dict[str, str]:
    """Return where each service shows its metrics: the gateway at `first`, the others on the next ports.

    Port 0 is any port, for each of them; an empty address is none. Raises ValueError for anything but host:port.
    """
    labels = ("gateway", "engine", "kvmanager")
    if not first:
        return dict.fromkeys(labels, "")
    host, _, port = first.rpartition(":")
    if not (host and port.isdecimal() and int(port) <= _LAST_PORT - len(labels)):
        raise ValueError(f"metrics_listen is {first!r}, it must be host:port with two more ports behind it")
    return {label: f"{host}:{int(port) and int(port) + offset}" for offset, label in enumerate(labels)}


class ServiceFailed(Exception):
    """A service ended by itself; the message says which and why."""


@dataclass
class _Process:
    label: str
    grace_seconds: float
    process: asyncio.subprocess.Process
    echo: "asyncio.Task[None]"
    last_line: str = ""


class Supervisor:
    """The three services as child processes. `show` gets each of their lines with the name of its service.

    `metrics` says where each shows its metrics, by the name of the service.
    """

    def __init__(
        self,
        kvmanager: KVManagerSettings,
        engine: EngineSettings,
        gateway: GatewaySettings,
        show: Print,
        metrics: dict[str, str],
    ) -> None:
        """Wire the services together; they run from `start` on."""
        self._folder = Path(tempfile.mkdtemp(prefix="quire-"))
        self.kvmanager_address = f"unix:{self._folder / 'kvmanager.sock'}"
        self.engine_address = f"unix:{self._folder / 'engine.sock'}"
        # Without a name of its own it would be called after its socket, which has another name at every start.
        engine_id = engine.engine_id or platform.node()
        self._engine = replace(
            engine,
            listen=self.engine_address,
            kvmanager=self.kvmanager_address,
            engine_id=engine_id,
        )
        # When the engine ends, so does everything: nothing is to be waited for.
        self._gateway = replace(gateway, engines=self.engine_address, kvmanager=self.kvmanager_address, failovers=0)
        self._kvmanager = replace(
            kvmanager,
            listen=self.kvmanager_address,
            log_format=engine.log_format,
            log_level=engine.log_level,
            otlp_endpoint=engine.otlp_endpoint,
            metrics_compat=engine.metrics_compat,
        )
        self._show = show
        self._metrics = metrics
        self._gateway_ready = asyncio.Event()
        self._processes: list[_Process] = []

    @property
    def address(self) -> str:
        """Where clients find the gateway."""
        return self._gateway.listen

    async def start(self) -> None:
        """Start all three, and return when the gateway is ready. Raises ServiceFailed."""
        for settings in (self._kvmanager, self._engine, self._gateway):
            await self._spawn(settings)
        ready = asyncio.create_task(self._gateway_ready.wait())
        failed = asyncio.create_task(self.wait())
        try:
            await asyncio.wait({ready, failed}, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                failed.result()
        finally:
            for task in (ready, failed):
                task.cancel()
            await asyncio.gather(ready, failed, return_exceptions=True)

    async def wait(self) -> None:
        """Wait until a service ends by itself, and raise ServiceFailed."""
        waits = {asyncio.create_task(child.process.wait()): child for child in self._processes}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            child = waits[done.pop()]
            await child.echo
            raise ServiceFailed(_how_it_ended(child))
        finally:
            for wait in waits:
                wait.cancel()

    async def stop(self) -> None:
        """Stop the gateway, then the engine, then the KV manager, each drained before the next."""
        for child in reversed(self._processes):
            with suppress(ProcessLookupError):
                child.process.send_signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(child.process.wait(), child.grace_seconds + _SECONDS_BEYOND_GRACE)
            except TimeoutError:
                self._show(child.label, "did not stop in time and is killed")
                child.process.kill()
                await child.process.wait()
            await child.echo
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _spawn(self, settings: KVManagerSettings | EngineSettings | GatewaySettings) -> None:
        label = type(settings).__name__.removesuffix("Settings").lower()
        # Its own word, because it may ask callers for keys and certificates that this process has none of.
        ready, is_ready = os.pipe()
        asyncio.get_running_loop().add_reader(ready, self._heard, label, ready)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "services.cli.main", label, *arguments_of(settings), "--metrics-listen", self._metrics[label]),
            # Never written to: it ends when this process does, however that comes, and then so does the service.
            stdin=asyncio.subprocess.PIPE,
            env={**os.environ, STOP_WITH_STDIN: "1", READY_DESCRIPTOR: str(is_ready)},
            pass_fds=(is_ready,),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            # Ctrl-C reaches the whole terminal's group; the order of stopping is decided here.
            start_new_session=True,
            limit=_LONGEST_LINE,
        )
        os.close(is_ready)
        child = _Process(label, settings.grace_seconds, process, asyncio.create_task(asyncio.sleep(0)))
        child.echo = asyncio.create_task(self._echo(child))
        self._processes.append(child)

    def _heard(self, label: str, ready: int) -> None:
        """A service is ready, or has ended before."""
        if os.read(ready, 1) and label == "gateway":
            self._gateway_ready.set()
        asyncio.get_running_loop().remove_reader(ready)
        os.close(ready)

    async def _echo(self, child: _Process) -> None:
        assert child.process.stdout is not None, "it was started with a pipe"
        while line := await _next_line(child.process.stdout):
            text = line.decode(errors="replace").rstrip()
            child.last_line = _message(text) or child.last_line
            self._show(child.label, text)


async def _next_line(output: asyncio.StreamReader) -> bytes:
    """Return the next line, empty at the end. One that is too long is lost, and this says so."""
    try:
        return await output.readline()
    except ValueError:
        return b"a line of more than %d bytes was lost\n" % _LONGEST_LINE


def _message(line: str) -> str:
    """Return what a line of a log says, which may be JSON."""
    if not line.startswith("{"):
        return line
    try:
        said = json.loads(line)["message"]
    except (ValueError, KeyError):
        return line
    return said if isinstance(said, str) else line


def _how_it_ended(child: _Process) -> str:
    status = child.process.returncode
    if status is not None and status < 0:
        return f"{child.label} was ended by {signal.Signals(-status).name}"
    return f"{child.label} ended with status {status}: {child.last_line}"
