"""The answer to a Step."""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from blocks.step import StepItem


class StepRefusal(Enum):
    """Why an item was refused."""

    OUT_OF_BLOCKS = 1
    UNKNOWN = 2
    ALREADY_EXISTS = 3
    INVALID = 4
    PIN_TOO_LARGE = 6


class Refusal(NamedTuple):
    """An item that was refused, by its list and its position in it; nothing of it was done."""

    item: StepItem
    position: int
    reason: StepRefusal
    detail: str


class TableChange(NamedTuple):
    """The new end of a sequence's table: entries from `first_index` on are `block_ids`.

    After a swap they are all of its entries, in the other tier.
    """

    sequence: int
    first_index: int
    block_ids: Sequence[int]
    room_tokens: int
    cached_tokens: int = 0


class Copy(NamedTuple):
    """A block to copy to another one, in the same tier or in the other."""

    source: int
    destination: int


class StepResult(NamedTuple):
    """What a Step did, and how many blocks can be handed out after it.

    The copies are made before anything that was granted here is used, in three launches: `device_to_host`,
    `host_to_device`, `copies` within the device. Each is safe as one parallel launch: no destination is a source, and
    none is a destination twice.

    `withheld_blocks` and `host_withheld_blocks` are those that an audit took out of circulation before the Step, or
    will when nobody holds them.
    """

    step: int
    refusals: tuple[Refusal, ...]
    tables: tuple[TableChange, ...]
    copies: tuple[Copy, ...]
    available_blocks: int
    available_host_blocks: int = 0
    device_to_host: tuple[Copy, ...] = ()
    host_to_device: tuple[Copy, ...] = ()
    withheld_blocks: tuple[int, ...] = ()
    host_withheld_blocks: tuple[int, ...] = ()

    @property
    def refused(self) -> set[tuple[StepItem, int]]:
        """The items that were refused, by their lists and their positions in them."""
        return {(refusal.item, refusal.position) for refusal in self.refusals}
