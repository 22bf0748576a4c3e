"""`quire serve`: the three services under one command."""

import asyncio
import signal

from rich.console import Console

from services.cli.local_model import engine_with_folder
from services.cli.supervisor import Supervisor
from services.engine.settings import EngineSettings
from services.gateway.settings import GatewaySettings
from services.model_store import ModelUnavailable

_COLORS = {"kvmanager": "cyan", "engine": "magenta", "gateway": "green", "serve": "bold"}


def serve(engine: EngineSettings, gateway: GatewaySettings, metrics: dict[str, str]) -> int:
    """Run until a signal (status 0) or until a service fails (status 1). `metrics`: where each shows its metrics."""
    console = Console(stderr=True, highlight=False)
    try:
        engine = engine_with_folder(engine)
    except ModelUnavailable as error:
        show(console, "serve", str(error))
        return 1
    except KeyboardInterrupt:
        show(console, "serve", "stopping: asked to")
        return 0
    supervisor = Supervisor(engine, gateway, lambda label, line: show(console, label, line), metrics)
    return asyncio.run(_supervise(supervisor, console))


def show(console: Console, label: str, line: str) -> None:
    """Print one line of a service, after its name."""
    console.print(f"[{_COLORS[label]}]{label:<9}[/] | ", end="", soft_wrap=True)
    console.print(line, markup=False, soft_wrap=True)


async def _supervise(supervisor: Supervisor, console: Console) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    life = asyncio.create_task(_start_and_watch(supervisor, console))
    asked = asyncio.create_task(stop.wait())
    await asyncio.wait({life, asked}, return_when=asyncio.FIRST_COMPLETED)
    failure = life.exception() if life.done() else None
    for task in (life, asked):
        task.cancel()
    await asyncio.gather(life, asked, return_exceptions=True)
    show(console, "serve", f"stopping: {'a service failed' if failure else 'asked to'}")
    await supervisor.stop()
    if failure:
        show(console, "serve", str(failure))
    return 1 if failure else 0


async def _start_and_watch(supervisor: Supervisor, console: Console) -> None:
    await supervisor.start()
    show(
        console,
        "serve",
        f"ready: gateway at {supervisor.address}, engine at {supervisor.engine_address}, "
        f"KV manager at {supervisor.kvmanager_address}",
    )
    await supervisor.wait()
