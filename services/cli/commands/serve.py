"""`quire serve`: all services under one command."""

import asyncio
import logging
import os
import signal
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from rich.console import Console

from engine.errors import ModelUnsupported
from services.cli.local.engines import split_engine
from services.cli.local.instances import Instance, NoSuchInstance, published, reachable, running
from services.cli.local.preflight import check_addresses, check_files
from services.cli.local.process import Print
from services.cli.local.settings import LocalSettings
from services.cli.local.supervisor import Supervisor
from services.cli.local_model import engine_with_folder
from services.engine.settings import EngineSettings
from services.engine.startup.generation_config import check_generation
from services.gateway.settings import GatewaySettings
from services.kvmanager.settings import KVManagerSettings
from services.models.model_store import ModelUnavailable
from services.runtime.logs.records import LogWriter, logging_to_stderr
from services.runtime.settings import InvalidSetting

log = logging.getLogger("quire")

_COLORS = {"kvmanager": "cyan", "engine": "magenta", "gateway": "green", "serve": "bold"}


def serve(
    kvmanager: KVManagerSettings,
    engine: EngineSettings,
    gateway: GatewaySettings,
    metrics: dict[str, str],
    local: LocalSettings,
) -> int:
    """Run until a signal (status 0) or until a service cannot be kept running (status 1).

    `metrics` holds the address of each one's metrics.
    """
    with ExitStack() as ending:
        show: Print = partial(_print, Console(stderr=True, highlight=False))
        if engine.log_format == "json":
            logs = ending.enter_context(logging_to_stderr("serve", engine.log_format, engine.log_level))
            show = partial(_pass_on, logs)
        try:
            _check_name(local)
            check_files(gateway, engine, kvmanager)
            check_addresses(gateway, split_engine(engine, local.engines), kvmanager, metrics.values())
            engine = engine_with_folder(engine)
            check_generation(engine.generation_config, Path(engine.model))
        except (InvalidSetting, ModelUnavailable, ModelUnsupported, NoSuchInstance) as error:
            show("serve", str(error), logging.ERROR)
            return 1
        except KeyboardInterrupt:
            show("serve", "stopping: signal received")
            return 0
        return asyncio.run(_supervise(Supervisor(kvmanager, engine, gateway, show, metrics, local), show, local))


def _print(console: Console, label: str, line: str, level: int = logging.INFO) -> None:
    """Print one line of a service, after its name."""
    if level > logging.INFO:
        line = f"{logging.getLevelName(level)} {line}"
    console.print(f"[{_COLORS[label.partition('-')[0]]}]{label:<9}[/] | ", end="", soft_wrap=True)
    console.out(line, highlight=False)


def _pass_on(logs: LogWriter, label: str, line: str, level: int = logging.INFO) -> None:
    """Log a line of a service: JSON lines unchanged, others under the service's name."""
    if line.startswith("{") and line.endswith("}"):
        logs.put(line)
    else:
        log.log(level, line, extra={"service": label})


def _check_name(local: LocalSettings) -> None:
    """Raise NoSuchInstance, before anything starts, if the name is in use."""
    if any(one.name == local.instance for one in running()):
        raise NoSuchInstance(
            f"--instance: a `quire serve` named {local.instance} is already running, give another name"
        )


async def _supervise(supervisor: Supervisor, show: Print, local: LocalSettings) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with ExitStack() as findable:
        life = asyncio.create_task(_start_and_watch(supervisor, show, local, findable))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({life, stopping}, return_when=asyncio.FIRST_COMPLETED)
        failure = life.exception() if life.done() else None
        for task in (life, stopping):
            task.cancel()
        await asyncio.gather(life, stopping, return_exceptions=True)
    reason, level = ("a service failed", logging.ERROR) if failure else ("signal received", logging.INFO)
    show("serve", f"stopping: {reason}", level)
    await supervisor.stop()
    if failure:
        show("serve", str(failure), logging.ERROR)
    return 1 if failure else 0


async def _start_and_watch(supervisor: Supervisor, show: Print, local: LocalSettings, findable: ExitStack) -> None:
    await supervisor.start()
    engines = ", ".join(f"{label} at {address}" for label, address in supervisor.engine_addresses.items())
    instance = Instance(
        name=local.instance or str(os.getpid()),
        gateway=reachable(supervisor.address),
        kvmanager=supervisor.kvmanager_address,
        engines=list(supervisor.engine_addresses.values()),
    )
    try:
        findable.enter_context(published(instance))
    except (OSError, NoSuchInstance) as error:
        show("serve", f"commands on this machine need --address: {error}")
    show("serve", f"ready: gateway at {supervisor.address}, {engines}, KV manager at {supervisor.kvmanager_address}")
    await supervisor.keep_running()
