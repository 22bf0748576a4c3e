"""Rows beside kept blocks: what their keys are hashes of, for the KV events of the next process.

A seal has the key alone; an event has also the parent, the tokens, and the digest of the salt. A row proves itself by a
checksum and by the key of the seal. One that a kill has torn, or that is older than the seal, only leaves its block
without an event. So rows need no order of stores, and the event loop writes them, not the thread that writes seals.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from struct import Struct

import numpy as np

from blocks import KEY_BYTES
from engine.kept.checksums import checksum_of
from engine.kept.header import KeptIdentity
from engine.kept.seal_writer import SealChanges
from kvmanager import PoolReport, PoolState
from services.engine.events.origins import OriginFields

ROW_FORMAT = 1
"""Version of a row, the seed of its checksum: rows of another one are not read."""

SALT_BYTES = 16
_FIRST, _LATER = 1, 2
# A row is a checksum of what follows, then this: whether the block is the first of its chain, the digest of the salt,
# and what was hashed before the tokens. The tokens are last.
_CHECKSUM_BYTES = 8
_SAID = Struct(f"<I4x{SALT_BYTES}s{KEY_BYTES}s")
_HEAD_BYTES = _CHECKSUM_BYTES + _SAID.size
_HASHED = _SAID.size - KEY_BYTES  # where the part begins whose hash is the key
_SALT = slice(_CHECKSUM_BYTES + _HASHED - SALT_BYTES, _CHECKSUM_BYTES + _HASHED)
_TOKEN_BYTES = array("i").itemsize
_NO_SALT = bytes(SALT_BYTES)
_LARGE_PAGE = 2 << 20


class OriginRows:
    """The rows of one kept memory. Belongs to the event loop, once made.

    `unknown` counts the blocks of the earlier process whose keys have no origin.
    """

    def __init__(self, memory: memoryview, identity: KeptIdentity, report: PoolReport, *, salts: bool) -> None:
        """Take `row_bytes(identity)` bytes, and read the rows of a report's blocks.

        Unless `salts`, rows of chains with a salt are erased, and none are written.
        """
        self._salts = salts
        self._closed = False
        self._kinds = list(_placed(memory, identity))
        if not salts:
            for tier in self._tiers():
                tier.erase_salted()
        self._adopted, self.unknown = self._read(report)

    def take_adopted(self) -> dict[bytes, OriginFields]:
        """Return the origins of the keys that an earlier process left; from the second call on none."""
        adopted, self._adopted = self._adopted, {}
        return adopted

    def record(
        self, changes: SealChanges, kinds: Sequence[PoolState], origin_of: Callable[[bytes], OriginFields | None]
    ) -> None:
        """Write the rows of blocks that got a key by the last block step.

        `changes` are those of its seals, `kinds` is the state after it, and `origin_of` returns what a key is the hash
        of: blocks for which it returns None get no row.
        """
        if self._closed:
            return
        for (device, host), state, own in zip(self._kinds, kinds, (changes, *changes.windows), strict=True):
            for block, sealing in own.device.sealed.items():
                self._write(device, block, origin_of(sealing.key))
            for copy in own.to_host:
                self._write(host, copy.destination, origin_of(state.host.key(copy.destination) or b""))
            for copy in own.to_device:
                self._write(device, copy.destination, origin_of(state.device.key(copy.destination) or b""))

    def close(self) -> None:
        """Write nothing any more: the memory is given up."""
        self._closed = True

    def _write(self, tier: "_TierRows", block: int, origin: OriginFields | None) -> None:
        if origin is not None and (self._salts or not origin[-1]):
            tier.write(block, origin)

    def _tiers(self) -> "Iterator[_TierRows]":
        for tiers in self._kinds:
            yield from tiers

    def _read(self, report: PoolReport) -> tuple[dict[bytes, OriginFields], int]:
        found: dict[bytes, OriginFields] = {}
        keyed = [one.keyed for kind in (report, *report.windows) for one in (kind.device, kind.host)]
        places = list(zip(self._tiers(), keyed, strict=False))  # an empty report has no windows
        for tier, keys in places:
            for block, key in keys.items():
                if key not in found and (origin := tier.read(block, key)):
                    found[key] = origin
        return found, sum(key not in found for _, keys in places for key in keys.values())


class _TierRows:
    """The rows of one tier's blocks."""

    def __init__(self, memory: memoryview, blocks: int, size: int) -> None:
        self._memory = memory[: (blocks + 1) * size]
        self._size = size

    def write(self, block: int, origin: OriginFields) -> None:
        hashed, first, tokens, salt = origin
        said = _SAID.pack(_FIRST if first else _LATER, bytes.fromhex(salt), hashed) + tokens
        at = block * self._size
        self._memory[at : at + self._size] = checksum_of(said, ROW_FORMAT).to_bytes(_CHECKSUM_BYTES, "little") + said

    def read(self, block: int, key: bytes) -> OriginFields | None:
        """Return the origin of a key, or None if the row belongs to another key."""
        at = block * self._size
        checksum = int.from_bytes(self._memory[at : at + _CHECKSUM_BYTES], "little")
        said = bytes(self._memory[at + _CHECKSUM_BYTES : at + self._size])
        if not checksum or checksum != checksum_of(said, ROW_FORMAT) or sha256(said[_HASHED:]).digest() != key:
            return None
        place, salt, hashed = _SAID.unpack_from(said)
        return hashed, place == _FIRST, said[_SAID.size :], salt.hex() if salt != _NO_SALT else ""

    def erase_salted(self) -> None:
        rows = np.frombuffer(self._memory, np.uint8).reshape(-1, self._size)
        rows[rows[:, _SALT].any(axis=1)] = 0


def row_bytes(identity: KeptIdentity) -> int:
    """Return the bytes of the rows of a memory, in whole large pages."""
    rows = sum(blocks + 1 for blocks in _blocks(identity))
    return -(-rows * _row_size(identity) // _LARGE_PAGE) * _LARGE_PAGE


def _row_size(identity: KeptIdentity) -> int:
    return _HEAD_BYTES + _TOKEN_BYTES * identity.block_size


def _blocks(identity: KeptIdentity) -> Iterable[int]:
    for kind in identity.kinds:
        yield from (kind.device_blocks, kind.host_blocks)


def _placed(memory: memoryview, identity: KeptIdentity) -> Iterator[tuple[_TierRows, _TierRows]]:
    size = _row_size(identity)
    for kind in identity.kinds:
        device = _TierRows(memory, kind.device_blocks, size)
        memory = memory[(kind.device_blocks + 1) * size :]
        yield device, _TierRows(memory, kind.host_blocks, size)
        memory = memory[(kind.host_blocks + 1) * size :]
