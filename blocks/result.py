"""The result of a block step."""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from blocks.step import StepItem


class StepRefusal(Enum):
    """The reason of a refusal."""

    OUT_OF_BLOCKS = 1
    UNKNOWN = 2
    ALREADY_EXISTS = 3
    INVALID = 4
    PIN_TOO_LARGE = 6


class Refusal(NamedTuple):
    """A refused item, given by its list and its position in it. The item changed nothing."""

    item: StepItem
    position: int
    reason: StepRefusal
    detail: str


class TableChange(NamedTuple):
    """The new end of a sequence's table: its entries from `first_index` on are `block_ids`.

    Indices are those of logical blocks. After a swap, `block_ids` are all entries, in the other tier. A new table of a
    window kind begins at `first_index`: earlier blocks have left the window.
    """

    sequence: int
    first_index: int
    block_ids: Sequence[int]
    room_tokens: int
    cached_tokens: int = 0


class Copy(NamedTuple):
    """A block copy within a tier or between the tiers."""

    source: int
    destination: int


class StepResult(NamedTuple):
    """The effects of a block step, and the number of blocks that can be handed out after it.

    The copies must be made before the granted blocks are used, in three launches: `device_to_host`, `host_to_device`,
    then `copies` within the device. Each list is safe as one parallel launch: no destination is a source, or occurs
    twice.

    `windows` has the same for each window kind, with the number of the block step and without refusals: an item is
    refused in all kinds.

    `withheld_blocks` and `host_withheld_blocks` were withheld by an audit before the block step, those in use on
    release.
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
    windows: tuple["StepResult", ...] = ()

    @property
    def refused(self) -> set[tuple[StepItem, int]]:
        """The list and the position of each refused item."""
        return {(refusal.item, refusal.position) for refusal in self.refusals}
