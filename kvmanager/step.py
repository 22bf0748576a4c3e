"""Plain values that go into a pool and come out of it: one Step of block operations and its result.

Token counts are in tokens, block counts in blocks, indices count blocks of a sequence's table from 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from kvmanager.tier.tier import BlockCounts, Eviction, Seal

_NO_BLOCKS = BlockCounts(0, 0, 0)


class FreeReason(Enum):
    """Why a sequence's blocks come back."""

    FINISHED = 1
    CANCELLED = 2
    FAILED = 3
    PREEMPTED = 4
    PRUNED = 5


class StepItem(Enum):
    """The lists of a Step, in the order in which they are applied."""

    COMMIT = 1
    PIN = 2
    FORK = 3
    FREE = 4
    SWAP_OUT = 5
    SWAP_IN = 6
    EXTEND = 7
    ALLOCATE = 8
    LENGTH = 9


class StepRefusal(Enum):
    """Why an item was refused."""

    OUT_OF_BLOCKS = 1
    UNKNOWN = 2
    ALREADY_EXISTS = 3
    INVALID = 4
    PIN_TOO_LARGE = 6


class Commit(NamedTuple):
    """Gives whole blocks, from `first_index` on, their keys; all earlier ones of the sequence have theirs."""

    sequence: int
    first_index: int
    token_ids: Sequence[int]


class Pin(NamedTuple):
    """Holds the leading blocks of a sequence, all of which must have keys, until they are unpinned."""

    pin_id: str
    sequence: int
    block_count: int


class Unpin(NamedTuple):
    """Removes a pin."""

    pin_id: str


class Reset(NamedTuple):
    """Forgets the keys of cached blocks, and takes those of held ones out of the index."""


PinChange = Pin | Unpin | Reset


class Fork(NamedTuple):
    """Lets `child` share the parent's blocks below `length` tokens; the room of both becomes `length`."""

    parent: int
    child: int
    length: int


class Free(NamedTuple):
    """Gives a sequence's table back, tail first."""

    sequence: int
    reason: FreeReason
    preempted_for_group: int = 0


class Extend(NamedTuple):
    """Makes room: pairs of a sequence of `group` and the tokens it needs room for; all of them or none."""

    group: int
    rooms: Sequence[tuple[int, int]]


class Allocate(NamedTuple):
    """Begins a group with its first sequence: takes the cached prefix, and blocks for what is computed next.

    `compute_tokens` is how many tokens beyond the cached prefix get room now. Refused unless all of `token_ids` would
    fit now with `spare_blocks` to spare: a prompt that could not be finished is not begun. `waited_seconds` is how long
    the group has waited for this; it decides nothing.
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
    """Says how many tokens of a sequence are computed, for exact fill counts. A plain pair will do."""

    sequence: int
    tokens: int


@dataclass(frozen=True)
class Step:
    """All block operations of one engine step, applied in the order of the fields."""

    step: int
    commits: Sequence[Commit] = ()
    pins: Sequence[PinChange] = ()
    forks: Sequence[Fork] = ()
    frees: Sequence[Free] = ()
    swap_outs: Sequence[int] = ()  # groups
    swap_ins: Sequence[int] = ()
    extends: Sequence[Extend] = ()
    allocates: Sequence[Allocate] = ()
    lengths: Sequence[tuple[int, int]] = ()


class TableChange(NamedTuple):
    """The new end of a sequence's table: entries from `first_index` on are `block_ids`.

    After a swap they are all of its entries, in the other tier.
    """

    sequence: int
    first_index: int
    block_ids: list[int]
    room_tokens: int
    cached_tokens: int = 0


class Refusal(NamedTuple):
    """An item that was refused, by its list and its position in it; nothing of it was done."""

    item: StepItem
    position: int
    reason: StepRefusal
    detail: str


class Copy(NamedTuple):
    """A block to copy to another one, in the same tier or in the other."""

    source: int
    destination: int


class Deed(NamedTuple):
    """What a verb did, for whoever keeps the history: an item of a Step, and the blocks concerned.

    Verbs write plain tuples of these fields, because making one of these takes as long as half a verb.

    `blocks` are those that were sealed, pinned, shared, given back, moved or granted. `other` is what else tells the
    verb's story: the child of a fork, the item of a free, the miss of an allocate.
    """

    item: StepItem
    sequence: int
    group: int
    blocks: Sequence[int]
    evicted: Sequence[Eviction]
    other: object


@dataclass(slots=True)
class StepResult:
    """What a Step did.

    The copies are made in three launches, in this order: `device_to_host`, `host_to_device`, `copies` within the
    device. Each is safe as one parallel launch: no destination is a source, and none is a destination twice.

    `withheld` and `host_withheld` are blocks that the audit took out before the Step, or will when nobody holds them.
    """

    step: int
    refusals: list[Refusal] = field(default_factory=list)
    sealed_blocks: list[int] = field(default_factory=list)
    sealed_keys: list[bytes] = field(default_factory=list)
    host_sealed: list[Seal] = field(default_factory=list)
    tables: list[TableChange] = field(default_factory=list)
    device_to_host: list[Copy] = field(default_factory=list)
    host_to_device: list[Copy] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    device: BlockCounts = _NO_BLOCKS
    host: BlockCounts = _NO_BLOCKS
    granted_blocks: int = 0
    evicted: list[Eviction] = field(default_factory=list)
    hit_tokens: int = 0
    query_tokens: int = 0
    deeds: list[tuple[StepItem, int, int, Sequence[int], Sequence[Eviction], object]] = field(default_factory=list)
    withheld: list[int] = field(default_factory=list)
    host_withheld: list[int] = field(default_factory=list)

    @property
    def sealed(self) -> list[Seal]:
        """The device blocks that were given a key, in this order."""
        return list(map(Seal, self.sealed_blocks, self.sealed_keys))

    @property
    def evicted_blocks(self) -> int:
        """How many keyed device blocks lost their keys because their space was needed."""
        return len(self.evicted)
