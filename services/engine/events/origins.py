"""Where keys come from: the parent, the tokens and the salt of each block that a Step commits."""

from array import array
from collections.abc import Iterator
from functools import lru_cache
from hashlib import sha256
from typing import NamedTuple

from blocks import Commit, Step, block_key
from kvmanager import PoolState

_SALT_BYTES = 16


class Origin(NamedTuple):
    """What a key is the hash of: the parent's key, or the root of its chain if it is the `first`, and the tokens.

    `salt` is a digest of the chain's salt in hexadecimal digits, empty without a salt.
    """

    hashed: bytes
    first: bool
    token_ids: "array[int]"
    salt: str

    @property
    def parent(self) -> bytes | None:
        """The key of the block before it, None for the first of a chain."""
        return None if self.first else self.hashed

    def is_of(self, key: bytes) -> bool:
        """Whether the key is the hash of this origin."""
        return block_key(self.hashed, self.token_ids) == key


def committed_origins(state: PoolState, step: Step) -> Iterator[tuple[bytes, Origin]]:
    """Yield the keys that the commits of a Step set if they are not refused, in order. `state` is that before the Step.

    Origins of commits that are refused have keys that no block gets.
    """
    ends: dict[int, bytes] = {}  # last keys of sequences that the Step commits to repeatedly
    for item in step.commits:
        if (sequence := state.sequences.get(item.sequence)) is None:
            continue
        hashed, salt = ends.get(item.sequence, sequence.last_key), salt_digest(sequence.salt)
        for key, origin in _chain(hashed, hashed == sequence.root, item, state.block_size, salt):
            hashed = key
            yield key, origin
        ends[item.sequence] = hashed


def _chain(hashed: bytes, first: bool, item: Commit, block_size: int, salt: str) -> Iterator[tuple[bytes, Origin]]:
    tokens = item.token_ids if isinstance(item.token_ids, array) else array("i", item.token_ids)
    for start in range(0, len(tokens) - block_size + 1, block_size):
        origin = Origin(hashed, first, tokens[start : start + block_size], salt)
        hashed, first = block_key(hashed, origin.token_ids), False
        yield hashed, origin


@lru_cache(4096)
def salt_digest(salt: bytes) -> str:
    """Return a digest of a salt in hexadecimal digits, empty for none: it separates tenants and names nobody."""
    return sha256(b"quire-salt-digest" + salt).hexdigest()[: 2 * _SALT_BYTES] if salt else ""
