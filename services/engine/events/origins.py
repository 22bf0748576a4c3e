"""Where keys come from: the parent, the tokens and the salt of each block that a block step commits."""

from array import array
from collections.abc import Collection, Iterator
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

from blocks import Commit, Step, block_key, block_keys
from kvmanager import PoolState

_SALT_BYTES = 16


# An Origin as an exact tuple of plain values, which the garbage collector does not traverse: an array it would.
OriginFields = tuple[bytes, bool, bytes, str]


class Origin(NamedTuple):
    """What a key is the hash of: the parent's key, or the root of its chain if it is the `first`, and the tokens.

    `tokens` are C ints. `salt` is a digest of the chain's salt in hexadecimal digits, empty without a salt.
    """

    hashed: bytes
    first: bool
    tokens: bytes
    salt: str

    @property
    def token_ids(self) -> "array[int]":
        """The tokens."""
        return array("i", self.tokens)

    @property
    def parent(self) -> bytes | None:
        """The key of the block before it, None for the first of a chain."""
        return None if self.first else self.hashed

    def is_of(self, key: bytes) -> bool:
        """Whether the key is the hash of this origin."""
        return block_key(self.hashed, self.token_ids) == key


class ChainEnd(NamedTuple):
    """Where a sequence's next key begins: its last key, or the root of its chain, and the digest of its salt."""

    hashed: bytes
    first: bool
    salt: str


def chain_ends(state: PoolState, step: Step, salt_key: bytes) -> dict[int, ChainEnd]:
    """Return the ends of the sequences that a block step will commit to; `salt_key` is for digests."""
    found = (state.sequences.get(item.sequence) for item in step.commits)
    return {
        one.id: ChainEnd(one.last_key, one.last_key == one.root, salt_digest(one.salt, salt_key))
        for one in found
        if one
    }


def committed_origins(
    step: Step, ends: dict[int, ChainEnd], refused: Collection[int], block_size: int
) -> Iterator[tuple[bytes, OriginFields]]:
    """Yield the keys that the commits of a block step have set, in order; `refused` has the positions of refused ones.

    `ends` has the state before the block step, and is changed to that after it.
    """
    for position, item in enumerate(step.commits):
        if position not in refused:
            end = ends[item.sequence]
            for key, origin in _chain(end, item, block_size):
                end = ChainEnd(key, False, end.salt)
                yield key, origin
            ends[item.sequence] = end


def _chain(end: ChainEnd, item: Commit, block_size: int) -> Iterator[tuple[bytes, OriginFields]]:
    hashed, first, salt = end
    token_ids = item.token_ids if isinstance(item.token_ids, array) else array("i", item.token_ids)
    tokens, width, start = token_ids.tobytes(), block_size * token_ids.itemsize, 0
    for key in block_keys(hashed, token_ids, block_size):
        yield key, (hashed, first, tokens[start : start + width], salt)
        hashed, first, start = key, False, start + width


@lru_cache(4096)
def salt_digest(salt: bytes, key: bytes) -> str:
    """Return the keyed digest of a salt in hexadecimal digits, or an empty text without a salt.

    Different salts have different digests; without the key, a salt cannot be guessed from its digest.
    """
    return blake2b(salt, key=key, digest_size=_SALT_BYTES).hexdigest() if salt else ""
