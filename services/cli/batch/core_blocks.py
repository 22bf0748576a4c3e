"""The KV manager's core as the block manager of an engine in the same process."""

import asyncio
from collections import deque
from collections.abc import Callable

from blocks import Step, StepResult
from kvmanager import KVManager, Ledger, PoolSpec


class CoreBlocks:
    """Answers block steps at once, on the engine's thread. See services.engine.startup.parts.BlockLink."""

    sessions = 1
    ready = True

    def __init__(self, spec: PoolSpec, _wake: Callable[[], None], *, ledger: Ledger) -> None:
        """Attach the pool. The engine needs no wake: an answer is there before its next turn."""
        self._manager = KVManager(1, ledger)
        self._session = self._manager.attach(spec)
        self._answers: deque[StepResult] = deque()
        self.attached, self.detached = asyncio.Event(), asyncio.Event()
        self.attached.set()

    @property
    def usage(self) -> float:
        """Share of the pool's device blocks that are held, 0 to 1, in the kind that has the least room."""
        return self._session.pool.usage

    def send(self, step: Step) -> None:
        """Apply a block step."""
        self._answers.append(self._manager.apply(self._session, step).result)

    def receive(self) -> StepResult | None:
        """Return the next answer, if any."""
        return self._answers.popleft() if self._answers else None

    async def run(self) -> None:
        """Wait until cancelled."""
        await asyncio.Event().wait()

    def close(self) -> None:
        """Detach the pool."""
        self.attached.clear()
        self.detached.set()
