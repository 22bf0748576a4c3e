"""Two KV managers behind the engine's protocol: the core in process, and the service over a real stream."""

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Protocol, TypeVar

import kvmanager
from blocks import BlockManager, Reattached, Step, StepResult
from engine.schedule.capacity import Capacity
from services.engine.block_client import AttachRefused, BlockClient
from services.engine.replica import Replica
from services.kvmanager.server import KVManagerService
from services.kvmanager.settings import KVManagerSettings
from tests.engine_in_process import FickleBlocks

SECONDS = 120
ENGINE = "engine"

_T = TypeVar("_T")


class Refused(Exception):
    """The manager refused this engine."""


class Link(Protocol):
    """An engine's link to the manager."""

    blocks: BlockManager

    def wait(self) -> None:
        """Block until `receive` may return a new answer."""

    def wait_until_broken(self) -> None:
        """Block until the stream has ended."""


class Manager(Protocol):
    """A KV manager that can stop and restart with empty pools; its engines then report."""

    def attach(self, block_size: int, device_blocks: int, incarnation: int = 1, engine_id: str = ENGINE) -> Link:
        """Attach an engine. Raises Refused."""

    def pool(self, engine_id: str = ENGINE) -> kvmanager.Pool:
        """Return an engine's pool. Raises UnknownPool."""

    def stop(self) -> None:
        """Stop and drop every pool."""

    def start(self) -> None:
        """Restart with no pools."""

    def close(self) -> None:
        """Release all resources."""


def answer(link: Link, step: Step) -> StepResult:
    """Send a Step and wait for its answer. Raises Reattached."""
    link.blocks.send(step)
    return next_answer(link)


def next_answer(link: Link) -> StepResult:
    """Wait for the next answer. Raises Reattached."""
    while (result := link.blocks.receive()) is None:
        link.wait()
    return result


def answers_until_reattached(link: Link) -> tuple[list[StepResult], int]:
    """Return the answers before Reattached is raised, and its available blocks."""
    answers = []
    try:
        while True:
            answers.append(next_answer(link))
    except Reattached as reattached:
        return answers, reattached.available_blocks


def wait_until_disconnected(link: Link) -> None:
    """Wait until the link is not ready; no answer may arrive before."""
    assert answers_until_disconnected(link) == []


def answers_until_disconnected(link: Link) -> list[StepResult]:
    """Return the answers received until the link is not ready."""
    answers = []
    while link.blocks.ready:
        result = link.blocks.receive()
        if result is not None:
            answers.append(result)
        elif link.blocks.ready:
            link.wait()
    return answers


def wait_until_ready(link: Link) -> None:
    while not link.blocks.ready:
        assert link.blocks.receive() is None
        if not link.blocks.ready:
            link.wait()


class CoreManager:
    def __init__(self) -> None:
        self._links: list[_CoreLink] = []
        self.start()

    def attach(self, block_size: int, device_blocks: int, incarnation: int = 1, engine_id: str = ENGINE) -> Link:
        spec = kvmanager.PoolSpec(engine_id, incarnation, "model", block_size, device_blocks)
        try:
            self._links.append(_CoreLink(self._manager, spec))
        except kvmanager.StaleIncarnation as error:
            raise Refused(str(error)) from error
        return self._links[-1]

    def pool(self, engine_id: str = ENGINE) -> kvmanager.Pool:
        return self._manager.session(engine_id).pool

    def stop(self) -> None:
        for link in self._links:
            link.blocks.lose()

    def start(self) -> None:
        self._manager = kvmanager.KVManager(epoch=1)
        for link in self._links:
            link.blocks.manager = self._manager
            link.blocks.restore()

    def close(self) -> None:
        pass


class _CoreLink:
    def __init__(self, manager: kvmanager.KVManager, spec: kvmanager.PoolSpec) -> None:
        self.blocks = _CoreBlocks(manager, spec)

    def wait(self) -> None:
        raise AssertionError("the core answers at once, but no answer is pending")

    def wait_until_broken(self) -> None:
        """Return at once: a replaced link breaks synchronously."""


class _CoreBlocks(FickleBlocks):
    """Blocks of a shared manager; a replaced session stays disconnected."""

    def __init__(self, manager: kvmanager.KVManager, spec: kvmanager.PoolSpec) -> None:
        super().__init__(Capacity(1, 1, spec.block_size, spec.device_blocks))
        self.manager = manager
        self.session = manager.attach(spec)
        self._replica = Replica(spec)

    def send(self, step: Step) -> None:
        try:
            super().send(step)
        except kvmanager.SessionReplaced:
            self.lose()


class LoopThread:
    """An event loop in a background thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="event loop", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(SECONDS)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SECONDS)
        self._loop.close()


class WireManager:
    """The service on a Unix socket and its links, on one event loop."""

    def __init__(self, loop: LoopThread, socket: Path) -> None:
        self._loop = loop
        self._address = f"unix:{socket}"
        self._links: list[WireLink] = []
        self.start()

    def attach(self, block_size: int, device_blocks: int, incarnation: int = 1, engine_id: str = ENGINE) -> Link:
        spec = kvmanager.PoolSpec(engine_id, incarnation, "model", block_size, device_blocks)
        self._links.append(WireLink(self._loop, self._address, spec))
        wait_until_ready(self._links[-1])
        return self._links[-1]

    def pool(self, engine_id: str = ENGINE) -> kvmanager.Pool:
        return self._service.manager.session(engine_id).pool

    def stop(self) -> None:
        self._loop.run(self._service.stop())
        for link in self._links:
            link.wait_until_broken()

    def start(self) -> None:
        self._service = self._loop.run(self._start())

    def close(self) -> None:
        for link in self._links:
            link.close()
        self._loop.run(self._service.stop())
        self._loop.run(_check_no_task_is_left())

    async def _start(self) -> KVManagerService:
        service = KVManagerService(KVManagerSettings(listen=self._address, map_listen="", lease_seconds=0))
        await service.start()
        return service


async def _check_no_task_is_left() -> None:
    """Fail if a broken stream leaked a task."""
    deadline = asyncio.get_running_loop().time() + SECONDS / 2
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        assert asyncio.get_running_loop().time() < deadline, f"tasks are left: {others}"
        await asyncio.wait(others, timeout=0.01)


class WireLink:
    """The engine's link; a task on the event loop reads its stream."""

    blocks: BlockClient

    def __init__(self, loop: LoopThread, address: str, spec: kvmanager.PoolSpec) -> None:
        self._loop = loop
        self._changed = threading.Event()
        self._loop.run(self._begin(address, spec))

    def wait(self) -> None:
        """Raises Refused if the manager refused the attach."""
        if self._task.done() and not self._changed.is_set():
            error = self._task.exception()
            assert isinstance(error, AttachRefused), error
            raise Refused(str(error))
        assert self._changed.wait(SECONDS), "no answer arrived"
        self._changed.clear()

    def wait_until_broken(self) -> None:
        self._loop.run(asyncio.wait_for(self.blocks.detached.wait(), SECONDS))

    def close(self) -> None:
        self._loop.run(self._end())

    async def _begin(self, address: str, spec: kvmanager.PoolSpec) -> None:
        self.blocks = BlockClient(address, spec, self._changed.set)
        self._task = asyncio.create_task(self.blocks.run())
        self._task.add_done_callback(lambda _: self._changed.set())

    async def _end(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
