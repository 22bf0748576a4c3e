"""Runs the services as processes over Unix sockets, restarts those that exit, and stops them in order."""

import asyncio
import logging
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from services.cli.local.engines import split_engine
from services.cli.local.process import Print, ServiceProcess
from services.cli.local.settings import LocalSettings
from services.engine.kept.memory_file import create_memory_file, path_of
from services.engine.kept.places import erase_left
from services.engine.settings import EngineSettings
from services.gateway.settings import GatewaySettings
from services.kvmanager.settings import KVManagerSettings
from services.runtime.addresses import MAX_PORT
from services.runtime.child_process import KEPT_MEMORY

_SERVE = "serve"

FIRST_DELAY_SECONDS = 1.0
LONGEST_DELAY_SECONDS = 30.0


class Restarts:
    """Counts the restarts of one service: at most `most` without a long ready time in between, with growing delays.

    The first one after a ready process is at once: there is nothing to wait for, and every request waits for it. A
    limit per time window would never end a crash loop whose every start takes longer than the window allows.
    """

    def __init__(self, most: int, reset_seconds: float) -> None:
        """Count from 0 again after the service was ready for `reset_seconds`."""
        self.most = most
        self.count = 0
        self._reset_seconds = reset_seconds

    def next_delay(self, ready_seconds: float) -> float | None:
        """Return the seconds until the next start, or None at the limit.

        `ready_seconds` is how long the process that has just ended was ready; 0 if it never was.
        """
        if ready_seconds and ready_seconds >= self._reset_seconds:
            self.count = 0
        if self.count >= self.most:
            return None
        self.count += 1
        if ready_seconds and self.count == 1:
            return 0.0
        return min(FIRST_DELAY_SECONDS * 2.0 ** min(max(self.count - 2, 0), 64), LONGEST_DELAY_SECONDS)


def engine_labels(count: int) -> list[str]:
    """Return the labels of engines in logs and messages."""
    return ["engine"] if count == 1 else [f"engine-{number}" for number in range(count)]


def metrics_addresses(first: str, engines: int = 1) -> dict[str, str]:
    """Return the metrics address of each service: the gateway at `first`, the others on the next ports.

    The order is: an engine, the KV manager, then further engines. Port 0 is any port, for each of them; an empty
    address is none. Raises ValueError for anything but host:port.
    """
    one, *more = engine_labels(engines)
    labels = ("gateway", one, "kvmanager", *more)
    if not first:
        return dict.fromkeys(labels, "")
    host, _, port = first.rpartition(":")
    if not (host and port.isdecimal() and int(port) <= MAX_PORT - len(labels) + 1):
        raise ValueError(f"metrics_listen must be host:port with {len(labels) - 1} more ports after it, not {first!r}")
    return {label: f"{host}:{int(port) and int(port) + offset}" for offset, label in enumerate(labels)}


class ServiceFailed(Exception):
    """A service exited and is not restarted; the message names it and the reason."""


class Supervisor:
    """KV manager, engines and gateway as child processes.

    `show` receives each of their log lines with the label. `metrics` has their metrics addresses by label.
    """

    def __init__(
        self,
        kvmanager: KVManagerSettings,
        engine: EngineSettings,
        gateway: GatewaySettings,
        show: Print,
        metrics: dict[str, str],
        local: LocalSettings,
    ) -> None:
        """Connect the services; they run from `start` on. Raises InvalidSetting if an engine's share would be empty."""
        self._engine_settings = engines = split_engine(engine, local.engines)
        self._folder = Path(tempfile.mkdtemp(prefix="quire-"))
        self._local = local
        self._show = show
        self.kvmanager_address = f"unix:{self._folder / 'kvmanager.sock'}"
        self.engine_addresses = {label: f"unix:{self._folder / label}.sock" for label in engine_labels(local.engines)}
        kvmanager = replace(
            kvmanager,
            listen=self.kvmanager_address,
            log_format=engine.log_format,
            log_level=engine.log_level,
            otlp_endpoint=engine.otlp_endpoint,
            metrics_compat=engine.metrics_compat,
        )
        gateway = replace(gateway, engines=",".join(self.engine_addresses.values()), kvmanager=self.kvmanager_address)
        self._kvmanager = ServiceProcess("kvmanager", kvmanager, metrics["kvmanager"], show)
        # Of blocks that outlive their engines, as long as this process lives.
        self._memories = [create_memory_file(label) for label in self.engine_addresses]
        self._engines = [
            ServiceProcess(
                label,
                replace(one, listen=address, kvmanager=self.kvmanager_address),
                metrics[label],
                show,
                {KEPT_MEMORY: str(path_of(memory))},
            )
            for one, (label, address), memory in zip(
                engines, self.engine_addresses.items(), self._memories, strict=True
            )
        ]
        self._gateway = ServiceProcess("gateway", gateway, metrics["gateway"], show)

    @property
    def address(self) -> str:
        """The gateway's address for clients; port 0 is replaced by the actual port once it is ready."""
        return self._gateway.address or self._gateway.settings.listen

    async def start(self) -> None:
        """Start all, and return when the engines and the gateway are ready. Raises ServiceFailed if one exits before.

        A service that exits at its first start is not restarted: the cause is most likely a setting.
        """
        for service in self._all():
            await service.start()
        ready = asyncio.create_task(self._ready())
        ends = {asyncio.create_task(service.ended()): service for service in self._all()}
        try:
            done, _ = await asyncio.wait({ready, *ends}, return_when=asyncio.FIRST_COMPLETED)
            for end, service in ends.items():
                if end in done:
                    raise ServiceFailed(service.exit_summary())
        finally:
            for task in (ready, *ends):
                task.cancel()
            await asyncio.gather(ready, *ends, return_exceptions=True)
        # Clients find it at the same address after a restart.
        self._gateway.settings = replace(self._gateway.settings, listen=self.address)

    async def keep_running(self) -> None:
        """Restart services that exit. Raises ServiceFailed when one has exited too often."""
        keepers = [asyncio.create_task(self._keep_running(service)) for service in self._all()]
        try:
            done, _ = await asyncio.wait(keepers, return_when=asyncio.FIRST_COMPLETED)
            done.pop().result()
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)

    async def stop(self) -> None:
        """Drain and stop the gateway, then the engines, then the KV manager."""
        for together in ([self._gateway], self._engines, [self._kvmanager]):
            await asyncio.gather(*(service.stop() for service in together))
        for memory in self._memories:
            os.close(memory)
        for settings in self._engine_settings:  # an engine that ended just before has not erased its file
            erase_left(settings)
        self._memories.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _ready(self) -> None:
        for service in (*self._engines, self._gateway):
            await service.ready.wait()

    def _all(self) -> list[ServiceProcess]:
        return [self._kvmanager, *self._engines, self._gateway]

    async def _keep_running(self, service: ServiceProcess) -> None:
        restarts = Restarts(self._local.max_restarts, self._local.restart_reset_seconds)
        while True:
            ready_seconds = await service.ended()
            delay = restarts.next_delay(ready_seconds)
            if delay is None:
                raise ServiceFailed(_given_up(service, restarts))
            number = f"restart {restarts.count} of at most {restarts.most}"
            when = f"in {delay:g} s" if delay else "at once"
            summary = f"{service.exit_summary()}: starting it again {when}, {number}"
            self._show(_SERVE, summary, logging.WARNING if service.was_stopped else logging.ERROR)
            await asyncio.sleep(delay)
            await service.start()


def _given_up(service: ServiceProcess, restarts: Restarts) -> str:
    tried = f" ({restarts.most} restarts before did not help)" if restarts.most else ""
    return f"{service.exit_summary()}{tried}"
