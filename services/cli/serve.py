"""`quire serve`: the three services under one command."""

import asyncio
import logging
import signal
from functools import partial

from rich.console import Console

from services.cli.local_model import engine_with_folder
from services.cli.supervisor import Print, Supervisor
from services.engine.settings import EngineSettings
from services.gateway.settings import GatewaySettings
from services.kvmanager.settings import KVManagerSettings
from services.logs import Logs, logging_to_stderr
from services.model_store import ModelUnavailable

log = logging.getLogger("quire")

_COLORS = {"kvmanager": "cyan", "engine": "magenta", "gateway": "green", "serve": "bold"}


def serve(
    kvmanager: KVManagerSettings, engine: EngineSettings, gateway: GatewaySettings, metrics: dict[str, str]
) -> int:
    """Run until a signal (status 0) or until a service fails (status 1). `metrics`: where each shows its metrics."""
    if engine.log_format == "json":
        with logging_to_stderr("serve", engine.log_format, engine.log_level) as logs:
            return _serve(kvmanager, engine, gateway, partial(_pass_on, logs), metrics)
    return _serve(kvmanager, engine, gateway, partial(_print, Console(stderr=True, highlight=False)), metrics)


def _serve(
    kvmanager: KVManagerSettings,
    engine: EngineSettings,
    gateway: GatewaySettings,
    show: Print,
    metrics: dict[str, str],
) -> int:
    try:
        engine = engine_with_folder(engine)
    except ModelUnavailable as error:
        show("serve", str(error))
        return 1
    except KeyboardInterrupt:
        show("serve", "stopping: asked to")
        return 0
    return asyncio.run(_supervise(Supervisor(kvmanager, engine, gateway, show, metrics), show))


def _print(console: Console, label: str, line: str) -> None:
    """Print one line of a service, after its name."""
    console.print(f"[{_COLORS[label]}]{label:<9}[/] | ", end="", soft_wrap=True)
    console.out(line, highlight=False)


def _pass_on(logs: Logs, label: str, line: str) -> None:
    """Log what is no JSON object in a service's name: a library wrote it, or this process."""
    if line.startswith("{") and line.endswith("}"):
        logs.put(line)
    else:
        log.info(line, extra={"service": label})


async def _supervise(supervisor: Supervisor, show: Print) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    life = asyncio.create_task(_start_and_watch(supervisor, show))
    asked = asyncio.create_task(stop.wait())
    await asyncio.wait({life, asked}, return_when=asyncio.FIRST_COMPLETED)
    failure = life.exception() if life.done() else None
    for task in (life, asked):
        task.cancel()
    await asyncio.gather(life, asked, return_exceptions=True)
    show("serve", f"stopping: {'a service failed' if failure else 'asked to'}")
    await supervisor.stop()
    if failure:
        show("serve", str(failure))
    return 1 if failure else 0


async def _start_and_watch(supervisor: Supervisor, show: Print) -> None:
    await supervisor.start()
    show(
        "serve",
        f"ready: gateway at {supervisor.address}, engine at {supervisor.engine_address}, "
        f"KV manager at {supervisor.kvmanager_address}",
    )
    await supervisor.wait()
