"""What an engine has of a block manager: it sends one Step a turn and goes on.

The answer is there before what it grants is needed.
"""

from collections.abc import Collection
from typing import Protocol

from blocks.result import StepResult
from blocks.step import Step


class Reattached(Exception):
    """The block manager was away, and has the pool again as the engine has it.

    Steps that were not answered until now never will be: what they freed and committed is so, what they asked for was
    not granted, and nothing was moved. `available_blocks` of the device and `available_host_blocks` can be handed out;
    `pins` are the ids of all pins that hold blocks.
    """

    def __init__(
        self, available_blocks: int, available_host_blocks: int = 0, pins: Collection[str] = frozenset()
    ) -> None:
        super().__init__(available_blocks)
        self.available_blocks = available_blocks
        self.available_host_blocks = available_host_blocks
        self.pins = pins


class BlockManager(Protocol):
    """Carries Steps to the process that keeps the pool, and brings the answers back in order."""

    @property
    def ready(self) -> bool:
        """Whether a Step can be sent now."""

    def send(self, step: Step) -> None:
        """Send a Step. Does not wait for its answer."""

    def receive(self) -> StepResult | None:
        """Return the next answer, or None while there is none. Does not wait.

        Raises Reattached, once for each time that the block manager was away and came back.
        """
