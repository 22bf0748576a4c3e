"""All three services in one process, so that a test sees every call of the product."""

import asyncio
import logging
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import httpx

from services.engine.server import EngineService
from services.engine.settings import EngineSettings
from services.gateway.server import GatewayService
from services.gateway.settings import GatewaySettings
from services.kvmanager.server import KVManagerService
from services.kvmanager.settings import KVManagerSettings
from services.runtime.service import Service

ROOT = Path(__file__).parents[1]
PRODUCT = ("blocks", "engine", "kvmanager", "services")
_READY_SECONDS = 60.0


@contextmanager
def calls(seen: Callable[[str], None]) -> Iterator[None]:
    """Report each call of a function of the product as `module:qualified.name`, in this thread and new ones.

    A coroutine or generator is reported at each resumption.
    """
    names: dict[CodeType, str] = {}

    def name_of(code: CodeType) -> str:
        path = Path(code.co_filename)
        if not path.is_relative_to(ROOT) or path.relative_to(ROOT).parts[0] not in PRODUCT:
            return ""
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        return f"{module}:{code.co_qualname}"

    def profile(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            if (name := names.get(code)) is None:
                name = names[code] = name_of(code)
            if name:
                seen(name)

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@asynccontextmanager
async def one_process(model: Path, sockets: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Run a KV manager, an engine and a gateway on this event loop; yield an HTTP client of the gateway."""
    at = {name: f"unix:{sockets / name}" for name in ("kvmanager", "engine", "gateway")}
    engine = EngineSettings(
        listen=at["engine"], kvmanager=at["kvmanager"], model=str(model), device_blocks=64, attention_backend="torch"
    )
    gateway = GatewayService(GatewaySettings(listen=at["gateway"], engines=at["engine"], http_listen="127.0.0.1:0"))
    services: list[Service] = [
        KVManagerService(KVManagerSettings(listen=at["kvmanager"], map_listen="")),
        EngineService(engine),
        gateway,
    ]
    running = []
    listening: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: listening.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("quire.gateway").addHandler(handler)
    logging.getLogger("quire.gateway").setLevel(logging.INFO)
    for service in services:
        await service.start()
        running.append(asyncio.create_task(service.run()))
    try:
        await asyncio.wait_for(gateway.readiness.wait(), _READY_SECONDS)
        async with httpx.AsyncClient(
            base_url=next(line for line in listening if "HTTP" in line).rpartition(" ")[2]
        ) as client:
            yield client
    finally:
        for service in reversed(services):
            await service.drain()
            await service.stop()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
