"""A block step: the block operations of one turn of an engine, as plain values.

Token counts are in tokens, block counts in blocks, indices count blocks of a sequence's table from 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class FreeReason(Enum):
    """The reason of a free."""

    FINISHED = 1
    CANCELLED = 2
    FAILED = 3
    PREEMPTED = 4
    PRUNED = 5


class CondemnReason(Enum):
    """Why the contents of a block are not what its key promises."""

    ADOPTION = 1  # its checksum differs at the first hit after kept memory was adopted
    SWAP_IN = 2  # its checksum differs after a swap in
    HOST_HIT = 3  # its checksum differs after the copy of a hit in the host tier
    HIT = 4  # its checksum differs at a hit that was sampled
    COPY = 5  # a copy failed
    RECOMPUTATION = 6  # its K and V differ from recomputed ones


class StepItem(Enum):
    """The lists of a block step, in the order of application."""

    COMMIT = 1
    PIN = 2
    FORK = 3
    FREE = 4
    SWAP_OUT = 5
    SWAP_IN = 6
    EXTEND = 7
    ALLOCATE = 8
    LENGTH = 9
    TRIM = 10  # after the commits
    CONDEMN = 11  # first


class Condemn(NamedTuple):
    """Withdraws the keys of blocks whose contents were found wrong. They are withheld, held ones on release.

    `sequence` is the one whose hit or copy found it, 0 if none did. All blocks are of one tier and one kind.
    """

    sequence: int
    blocks: Sequence[int]
    reason: CondemnReason
    host: bool = False
    kind: int = 0


class Commit(NamedTuple):
    """Sets the keys of computed whole blocks from `first_index` on. All earlier blocks must have keys."""

    sequence: int
    first_index: int
    token_ids: Sequence[int]


class Trim(NamedTuple):
    """Reports that no query of a sequence below `position` will be computed any more.

    Each window kind releases the leading blocks that only such queries see.
    """

    sequence: int
    position: int


class Pin(NamedTuple):
    """Holds the leading blocks of a sequence until they are unpinned. They must be committed."""

    pin_id: str
    sequence: int
    block_count: int


class Unpin(NamedTuple):
    """Removes a pin."""

    pin_id: str


class Reset(NamedTuple):
    """Resets the prefix cache: cached blocks become free, and the keys of held blocks are removed from the index."""


PinChange = Pin | Unpin | Reset


class Fork(NamedTuple):
    """Adds a sequence that shares the parent's blocks below `length` tokens. The room of both becomes `length`."""

    parent: int
    child: int
    length: int


class Free(NamedTuple):
    """Releases a sequence's blocks, tail first, and removes it."""

    sequence: int
    reason: FreeReason
    preempted_for_group: int = 0


class Extend(NamedTuple):
    """Adds room for tokens. `rooms` has pairs of a sequence of `group` and its new total; all are granted or none."""

    group: int
    rooms: Sequence[tuple[int, int]]


class Allocate(NamedTuple):
    """Begins a group with its first sequence, from the cached prefix and blocks for the tokens that are computed next.

    `compute_tokens` tokens beyond the cached prefix get room now. The item is refused unless blocks for all of
    `token_ids` and `spare_blocks` more are available, so that a prompt that begins can be completed. A window kind
    needs blocks for the window and for `compute_tokens`, and its number of `window_spares` more. `waited_seconds`, the
    time since the group arrived or was preempted, and `prefix_of`, the request that computed their common prefix
    meanwhile, are only recorded.
    """

    group: int
    sequence: int
    request_id: str
    salt: bytes
    token_ids: Sequence[int]
    compute_tokens: int
    spare_blocks: int = 0
    waited_seconds: float = 0.0
    prefix_of: str = ""
    window_spares: Sequence[int] = ()


class Length(NamedTuple):
    """Reports the number of computed tokens of a sequence, for exact fill counts. A plain pair is accepted too."""

    sequence: int
    tokens: int


@dataclass(frozen=True)
class Step:
    """All block operations of one turn. Lists are applied in the order of the fields, items in full or not at all."""

    step: int
    condemns: Sequence[Condemn] = ()
    commits: Sequence[Commit] = ()
    trims: Sequence[Trim] = ()
    pins: Sequence[PinChange] = ()
    forks: Sequence[Fork] = ()
    frees: Sequence[Free] = ()
    swap_outs: Sequence[int] = ()  # groups
    swap_ins: Sequence[int] = ()
    extends: Sequence[Extend] = ()
    allocates: Sequence[Allocate] = ()
    lengths: Sequence[tuple[int, int]] = ()
