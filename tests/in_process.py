"""The KV manager's core as the engine's block manager, without a network."""

from collections import deque
from collections.abc import Callable

import kvmanager
from blocks import Step, StepResult
from engine.schedule.capacity import Capacity


class InProcessBlocks:
    """A block manager that answers at once. `observe` receives every Step with its result."""

    def __init__(
        self,
        capacity: Capacity,
        observe: Callable[[Step, kvmanager.AppliedStep], None] | None = None,
        host_blocks: int = 0,
    ):
        tiers = (capacity.device_blocks, host_blocks or capacity.host_blocks)
        spec = kvmanager.PoolSpec("engine", 1, "model", capacity.block_size, *tiers, windows=capacity.windows)
        self.manager = kvmanager.KVManager(epoch=1)
        self.session = self.manager.attach(spec)
        self.ready = True
        self._observe = observe
        self._answers: deque[StepResult] = deque()

    @property
    def pool(self) -> kvmanager.Pool:
        return self.session.pool

    def send(self, step: Step) -> None:
        applied = self.manager.apply(self.session, step)
        if self._observe:
            self._observe(step, applied)
        self._answers.append(applied.result)

    def receive(self) -> StepResult | None:
        return self._answers.popleft() if self._answers else None


def adopted(spec: kvmanager.PoolSpec, report: kvmanager.PoolReport) -> kvmanager.Pool:
    """Run an adoption to its end."""
    adoption = kvmanager.adopt(spec, report)
    try:
        while True:
            next(adoption)
    except StopIteration as end:
        return end.value
