"""What the engine needs from a block manager: plain values to send and receive, and the protocol of their carrier.

The engine asks ahead: it sends one Step per turn and goes on; the answer is there before what it grants is needed.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol


class FreeReason(Enum):
    """Why a sequence's blocks are given back."""

    FINISHED = 1
    CANCELLED = 2
    FAILED = 3
    PREEMPTED = 4
    PRUNED = 5


class StepItem(Enum):
    """The lists of a Step."""

    COMMIT = 1
    PIN = 2
    FORK = 3
    FREE = 4
    SWAP_OUT = 5
    SWAP_IN = 6
    EXTEND = 7
    ALLOCATE = 8
    LENGTH = 9


class Commit(NamedTuple):
    """Whole blocks that were seen to be written, from `first_index` of the table on, with their tokens."""

    sequence: int
    first_index: int
    token_ids: Sequence[int]


class Pin(NamedTuple):
    """Holds the leading blocks of a sequence, all of them committed, until they are unpinned."""

    pin_id: str
    sequence: int
    block_count: int


class Unpin(NamedTuple):
    """Removes a pin."""

    pin_id: str


class Reset(NamedTuple):
    """Forgets all cached prefixes; nobody finds the blocks that are held now either."""


PinChange = Pin | Unpin | Reset


class Fork(NamedTuple):
    """A new sequence that shares the parent's blocks below `length`; the room of both becomes `length`."""

    parent: int
    child: int
    length: int


class Free(NamedTuple):
    """A sequence whose blocks are given back."""

    sequence: int
    reason: FreeReason
    preempted_for_group: int = 0


class Extend(NamedTuple):
    """Pairs of a sequence of `group` and the tokens it needs room for; all of them or none."""

    group: int
    rooms: Sequence[tuple[int, int]]


class Allocate(NamedTuple):
    """A new group's first sequence: its tokens, and how many beyond the cached prefix need room now.

    It is refused unless all tokens would fit now with `spare_blocks` to spare. `waited_seconds` is for the history.
    """

    group: int
    sequence: int
    request_id: str
    salt: bytes
    token_ids: Sequence[int]
    compute_tokens: int
    spare_blocks: int = 0
    waited_seconds: float = 0.0


class Length(NamedTuple):
    """How many tokens of a sequence are computed."""

    sequence: int
    tokens: int


@dataclass
class Step:
    """Block operations of one turn, applied in the order of the fields, each item all or nothing."""

    step: int
    commits: list[Commit] = field(default_factory=list)
    pins: list[PinChange] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    frees: list[Free] = field(default_factory=list)
    swap_outs: list[int] = field(default_factory=list)  # groups
    swap_ins: list[int] = field(default_factory=list)
    extends: list[Extend] = field(default_factory=list)
    allocates: list[Allocate] = field(default_factory=list)
    lengths: list[Length] = field(default_factory=list)

    def __bool__(self) -> bool:
        """Return whether anything is asked."""
        return any(vars(self)[name] for name in vars(self) if name != "step")


class TableChange(NamedTuple):
    """The new end of a sequence's table: entries from `first_index` on are `block_ids`."""

    sequence: int
    first_index: int
    block_ids: Sequence[int]
    room_tokens: int
    cached_tokens: int


class Refusal(NamedTuple):
    """An item that was refused, by its list and its position in it; nothing of it was done."""

    item: StepItem
    position: int
    detail: str


class Copy(NamedTuple):
    """A block to copy, within the device or to the other tier, before anything the same answer granted is used."""

    source: int
    destination: int


@dataclass(frozen=True)
class StepResult:
    """What a Step did, and how many blocks can be handed out after it.

    The copies are made in this order: `device_to_host`, `host_to_device`, `copies` within the device.
    `withheld_blocks` are those that an audit took out of circulation before it; who holds one keeps it until the end.
    """

    step: int
    refusals: Sequence[Refusal]
    tables: Sequence[TableChange]
    copies: Sequence[Copy]
    available_blocks: int
    available_host_blocks: int = 0
    device_to_host: Sequence[Copy] = ()
    host_to_device: Sequence[Copy] = ()
    withheld_blocks: Sequence[int] = field(default_factory=list)
    host_withheld_blocks: Sequence[int] = field(default_factory=list)


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
    """Carries Steps to whoever keeps the books, and brings the answers back in order."""

    @property
    def ready(self) -> bool:
        """Whether a Step can be sent now."""

    def send(self, step: Step) -> None:
        """Send a Step. Does not wait for its answer."""

    def receive(self) -> StepResult | None:
        """Return the next answer, or None while there is none. Does not wait.

        Raises Reattached, once for each time that the block manager was away and came back.
        """
