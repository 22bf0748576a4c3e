"""Plain values that go into a pool and come out of it: one Step of block operations and its result.

Token counts are in tokens, block counts in blocks, indices count blocks of a sequence's table from 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from kvmanager.tier import BlockCounts


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
    FORK = 3
    FREE = 4
    EXTEND = 7
    ALLOCATE = 8
    LENGTH = 9


class StepRefusal(Enum):
    """Why an item was refused."""

    OUT_OF_BLOCKS = 1
    UNKNOWN = 2
    ALREADY_EXISTS = 3
    INVALID = 4


class Commit(NamedTuple):
    """Gives whole blocks, from `first_index` on, their keys; all earlier ones of the sequence have theirs."""

    sequence: int
    first_index: int
    token_ids: Sequence[int]


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
    fit now with `spare_blocks` to spare: a prompt that could not be finished is not begun.
    """

    group: int
    sequence: int
    request_id: str
    salt: bytes
    token_ids: Sequence[int]
    compute_tokens: int
    spare_blocks: int = 0


class Length(NamedTuple):
    """Says how many tokens of a sequence are computed, for exact fill counts."""

    sequence: int
    tokens: int


@dataclass(frozen=True)
class Step:
    """All block operations of one engine step, applied in the order of the fields."""

    step: int
    commits: Sequence[Commit] = ()
    forks: Sequence[Fork] = ()
    frees: Sequence[Free] = ()
    extends: Sequence[Extend] = ()
    allocates: Sequence[Allocate] = ()
    lengths: Sequence[Length] = ()


class TableChange(NamedTuple):
    """The new end of a sequence's table: entries from `first_index` on are `block_ids`."""

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
    """A block to copy within the device."""

    source: int
    destination: int


class Seal(NamedTuple):
    """A block that was given its key."""

    block: int
    key: bytes


@dataclass
class StepResult:
    """What a Step did. The copies are safe as one parallel launch: no destination is a source."""

    step: int
    refusals: list[Refusal] = field(default_factory=list)
    sealed: list[Seal] = field(default_factory=list)
    tables: list[TableChange] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    device: BlockCounts = field(default_factory=lambda: BlockCounts(0, 0, 0))
    granted_blocks: int = 0
    evicted_blocks: int = 0
    hit_tokens: int = 0
    query_tokens: int = 0
