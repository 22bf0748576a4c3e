"""The engine's interface to a block manager: it sends one block step per turn and does not wait for the result.

The result arrives before the granted blocks are needed.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

from blocks.result import StepResult
from blocks.step import Step


class Reattached(Exception):
    """The connection to the block manager was lost, and its pool has been restored from the engine's replica.

    Block steps in flight will not be answered. Their commits, pins, forks, frees and lengths were applied; their swaps,
    extends and allocates were not. `available_blocks` of the device tier and `available_host_blocks` can be handed out,
    and in each window kind those of `windows`; `pins` are the ids of all existing pins.
    """

    def __init__(
        self,
        available_blocks: int,
        available_host_blocks: int = 0,
        pins: Collection[str] = frozenset(),
        windows: Sequence[tuple[int, int]] = (),
    ) -> None:
        super().__init__(available_blocks)
        self.available_blocks = available_blocks
        self.available_host_blocks = available_host_blocks
        self.pins = pins
        self.windows = windows


class BlockManager(Protocol):
    """Sends block steps to the process that owns the pool, and receives the results in order."""

    @property
    def ready(self) -> bool:
        """Whether a block step can be sent now."""

    def send(self, step: Step) -> None:
        """Send a block step without waiting for its result."""

    def receive(self) -> StepResult | None:
        """Return the next result, or None if none has arrived. Does not wait.

        Raises Reattached once for each lost connection that was restored.
        """
