"""The KV manager's core in the engine's process, where no process of its own can be reached."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from blocks import BlockManager, Step, StepResult
from kvmanager import KVManager, PoolSpec


class Connection(NamedTuple):
    """A pool's block manager, and a function that waits for it after a turn without progress."""

    blocks: BlockManager
    wait: Callable[[bool], None]


@contextmanager
def in_process(spec: PoolSpec) -> Iterator[Connection]:
    """Yield an empty pool. It needs neither gRPC nor protobuf."""
    yield Connection(_CoreBlocks(spec), lambda _progressed: None)


class _CoreBlocks:
    """A block manager that answers at once."""

    ready = True

    def __init__(self, spec: PoolSpec) -> None:
        self._manager = KVManager(epoch=1)
        self._session = self._manager.attach(spec)
        self._answers: deque[StepResult] = deque()

    def send(self, step: Step) -> None:
        self._answers.append(self._manager.apply(self._session, step).result)

    def receive(self) -> StepResult | None:
        return self._answers.popleft() if self._answers else None
