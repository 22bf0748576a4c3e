"""A pool that is attached to a KV manager in another process, by gRPC."""

import asyncio
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.gpu_check.pools.in_process import Connection
from kvmanager import PoolSpec
from services.engine.block_client import BlockClient

_WAIT_SECONDS = 20


@contextmanager
def attached(spec: PoolSpec) -> Iterator[Connection]:
    """Start a KV manager, and attach an empty pool."""
    news = threading.Event()
    with _manager() as address, _event_loop() as loop:
        link, task = asyncio.run_coroutine_threadsafe(_attach(address, spec, news.set), loop).result(_WAIT_SECONDS)

        def wait(progressed: bool) -> None:
            if not progressed:
                assert news.wait(_WAIT_SECONDS), "the KV manager does not answer"
                news.clear()

        while not link.ready:
            wait(progressed=False)
            link.receive()
        yield Connection(link, wait)
        loop.call_soon_threadsafe(task.cancel)


async def _attach(address: str, spec: PoolSpec, wake: Any) -> tuple[BlockClient, "asyncio.Task[None]"]:
    link = BlockClient(address, spec, wake)
    return link, asyncio.create_task(link.run())


@contextmanager
def _manager() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "kvmanager.sock"
        command = [sys.executable, "-m", "bench.gpu_check.pools.manager_process", str(socket)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "serving\n", "the KV manager did not start"
        try:
            yield f"unix:{socket}"
        finally:
            process.communicate()


@contextmanager
def _event_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_WAIT_SECONDS)
