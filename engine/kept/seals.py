"""Seals: what a tier's blocks contain, in the memory beside them.

A seal is written by the engine's thread, and read by the next process after the kernel ended the writer between any two
of its stores: each change has an order in which no seal ever covers bytes that are not its key's. Its `state` is the
last store of a sealing, and the first of everything else.
"""

from collections.abc import Sequence
from enum import IntEnum
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from blocks import KEY_BYTES
from engine.kept.checksums import NONE, checksum_of

SEAL = np.dtype(
    [
        ("key", np.uint8, (KEY_BYTES,)),
        ("state", np.uint32),
        ("depth", np.uint32),  # blocks before it in its chain
        ("resets", np.uint32),  # resets of the pool before its sequence began
        ("generation", np.uint32),  # the number of the process that sealed it
        ("stamp", np.uint64),  # when it was released last; HELD while it is held, 0 without contents
        ("checksum", np.uint64),  # of the block's bytes
        ("own", np.uint64),  # checksum of what it says of a sealed block, and of its place
    ]
)
assert SEAL.itemsize == 72, "the layout of kept memory depends on it"

# Key, depth, resets, generation, checksum, block.
_SAID = Struct(f"<{KEY_BYTES}sIIIQI")

# The fields of a seal that are written together, and where they begin: numpy takes twenty times as long to store them.
_KEY, _STATE, _NUMBERS, _CHECKSUMS = Struct(f"<{KEY_BYTES}s"), Struct("<I"), Struct("<III"), Struct("<QQ")
_OFFSETS = {name: offset for name, (_, offset, *_) in (SEAL.fields or {}).items()}
_STATE_AT, _NUMBERS_AT, _CHECKSUMS_AT = _OFFSETS["state"], _OFFSETS["depth"], _OFFSETS["checksum"]

MOST = (1 << 31) - 1
"""More processes and resets than a memory can have."""

MOST_STAMP = 1 << 62

HELD = (1 << 64) - 1
"""The stamp of a block that a sequence or a pin holds."""


class SealState(IntEnum):
    """What a seal says about its block."""

    OPEN = 0
    """Its contents are unknown."""
    SEALED = 1
    """It has K and V of its key's tokens."""
    WITHHELD = 2
    """An audit or the engine took it out of circulation."""


_OPEN, _SEALED, _WITHHELD = map(int, SealState)


class Sealing(NamedTuple):
    """The contents of a block that is sealed: its key, the blocks before it in its chain, and the resets before it.

    `checksum` is that of its bytes, NONE if none was computed.
    """

    key: bytes
    depth: int
    resets: int
    checksum: int = NONE


class Seals:
    """The seals of one tier's blocks, in shared memory."""

    def __init__(self, memory: memoryview | bytearray, blocks: int) -> None:
        """Take `seal_bytes(blocks)` bytes, which hold seals, or zeros for open ones."""
        self._seals: npt.NDArray[Any] = np.frombuffer(memory, SEAL, blocks + 1)
        self._bytes: Any = self._seals.view(np.uint8)  # what struct can pack into
        self._state = self._seals["state"]
        self._stamp = self._seals["stamp"]
        self._checksum = self._seals["checksum"]
        self.generation = 0  # of the process that writes
        self.layout = 0  # a digest of how the blocks are laid out: seals of another layout are broken

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self._seals) - 1

    def state(self, block: int) -> SealState:
        """Return what the seal says."""
        return SealState(int(self._state[block]))

    def sealing(self, block: int) -> Sealing | None:
        """Return the contents of a sealed block, None for another one."""
        one = self._seals[block]
        if one["state"] != SealState.SEALED:
            return None
        return Sealing(one["key"].tobytes(), int(one["depth"]), int(one["resets"]), int(one["checksum"]))

    def checksum(self, block: int) -> int:
        """Return the checksum of a block's bytes when they were sealed, or copied without a key."""
        return int(self._checksum[block])

    def note(self, block: int, checksum: int) -> None:
        """Record the checksum of a block that was copied without a key."""
        self._checksum[block] = checksum

    def open(self, blocks: Sequence[int]) -> None:
        """Break the seals of blocks that will be written to. Withheld blocks stay withheld."""
        state = self._state
        state[[block for block in blocks if state.item(block) == _SEALED]] = _OPEN
        self._stamp[list(blocks)] = 0

    def seal(self, block: int, sealing: Sealing) -> None:
        """Seal a block whose contents are complete. A withheld one stays so."""
        memory, at = self._bytes, block * SEAL.itemsize
        if _STATE.unpack_from(memory, at + _STATE_AT)[0] == _WITHHELD:
            return
        _STATE.pack_into(memory, at + _STATE_AT, _OPEN)
        _KEY.pack_into(memory, at, sealing.key)
        _NUMBERS.pack_into(memory, at + _NUMBERS_AT, sealing.depth, sealing.resets, self.generation)
        own = self._own(block, sealing, self.generation)
        _CHECKSUMS.pack_into(memory, at + _CHECKSUMS_AT, sealing.checksum, own)
        _STATE.pack_into(memory, at + _STATE_AT, _SEALED)

    def _own(self, block: int, sealing: Sealing, generation: int) -> int:
        key, depth, resets, checksum = sealing
        return checksum_of(_SAID.pack(key, depth, resets, generation, checksum, block), self.layout)

    def repair(self, latest: int) -> list[int]:
        """Open seals with an unknown state or a wrong checksum of their own; return their blocks.

        A seal's checksum does not cover state and stamp. The checksum of the bytes finds a wrong state, and a stamp
        only orders evictions: one beyond `latest` becomes the oldest.
        """
        self._stamp[(self._stamp > max(latest, len(self))) & (self._stamp != HELD)] = 0
        broken = np.flatnonzero(self._state > max(SealState)).tolist()
        for block in np.flatnonzero(self._state == SealState.SEALED).tolist():
            one, sealing = self._seals[block], self.sealing(block)
            if sealing is None or self._own(block, sealing, int(one["generation"])) != int(one["own"]):
                broken.append(block)
        self._state[broken] = SealState.OPEN
        self._stamp[broken] = 0
        return broken

    def hold(self, blocks: Sequence[int]) -> None:
        """Mark blocks as held."""
        self._stamp[list(blocks)] = HELD

    def release(self, blocks: Sequence[int], stamp: int) -> None:
        """Mark blocks as released at a time."""
        self._stamp[list(blocks)] = stamp

    def withhold(self, blocks: Sequence[int]) -> None:
        """Take blocks out of circulation for as long as the memory is kept."""
        self._state[list(blocks)] = SealState.WITHHELD

    def cached(self, resets: int) -> dict[int, bytes]:
        """Return the sealed blocks of this count of resets with their keys, those first that are to be evicted first.

        That is in order of release, and blocks that were held last; a chain's tail comes before its head.
        """
        found = np.flatnonzero((self._state[1:] == SealState.SEALED) & (self._seals["resets"][1:] == resets)) + 1
        depth = self._seals["depth"][found].astype(np.int64)
        ordered = found[np.lexsort((-depth, self._stamp[found]))]
        keys = self._seals["key"][ordered].tobytes()
        return {int(block): keys[KEY_BYTES * at : KEY_BYTES * (at + 1)] for at, block in enumerate(ordered.tolist())}

    def are_damaged(self, resets: int, generation: int, stamp: int) -> bool:
        """Return whether a seal is not one that earlier processes wrote, or all blocks are withheld."""
        seals, state = self._seals[1:], self._state[1:]
        sealed = seals[state == SealState.SEALED]
        stamps = self._stamp[1:]
        return bool(
            (state > max(SealState)).any()
            or (len(state) and (state == SealState.WITHHELD).all())
            or ((stamps > max(stamp, len(self))) & (stamps != HELD)).any()
            or (sealed["resets"] > resets).any()
            or (sealed["generation"] > generation).any()
            or (sealed["depth"] >= MOST).any()
            or not sealed["key"].any(axis=1).all()
        )

    def settle(self, resets: int) -> int:
        """Leave no block held, because the process that held it has ended; the order of eviction stays.

        Returns how many blocks that process lost: held ones without a seal.
        """
        lost = np.flatnonzero((self._state == SealState.OPEN) & (self._stamp == HELD))
        cached = list(self.cached(resets))
        self._stamp[lost] = 0
        self._stamp[cached] = np.arange(1, len(cached) + 1)
        return len(lost)

    def sealed_count(self, resets: int) -> int:
        """Return the number of sealed blocks of this count of resets, which another thread may be changing."""
        return int(np.count_nonzero((self._state == SealState.SEALED) & (self._seals["resets"] == resets)))

    def withheld(self) -> list[int]:
        """Return the withheld blocks."""
        found: list[int] = (np.flatnonzero(self._state[1:] == SealState.WITHHELD) + 1).tolist()
        return found


def seal_bytes(blocks: int) -> int:
    """Return the bytes of the seals of a tier, block 0 included."""
    return (blocks + 1) * SEAL.itemsize
