"""A Step: the block operations of one turn of an engine, as plain values.

Token counts are in tokens, block counts in blocks, indices count blocks of a sequence's table from 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class FreeReason(Enum):
    """Why a sequence's blocks are given back."""

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


class Commit(NamedTuple):
    """Gives whole blocks that were written, from `first_index` on, their keys; all earlier ones have theirs."""

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
    """Forgets all cached prefixes, and takes the keys of held blocks out of the index."""


PinChange = Pin | Unpin | Reset


class Fork(NamedTuple):
    """Lets a new sequence share the parent's blocks below `length` tokens; the room of both becomes `length`."""

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
    the group has waited for this; it is for the history and decides nothing.
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
    """All block operations of one turn, applied in the order of the fields, each item all or nothing."""

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
