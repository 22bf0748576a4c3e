"""Keys of full blocks, which identify the blocks' contents.

K and V at a position depend on all tokens up to it, so a block's key is a hash chained over its parent's key and its
own tokens. The chain starts from the model's fingerprint and the tenant's salt: two blocks have equal keys only if the
same model computed the same tokens for requests that may share them.
"""

from array import array
from collections.abc import Iterator, Sequence
from functools import cache
from hashlib import sha256
from itertools import islice
from struct import Struct

KEY_BYTES = 32
_SCHEME = b"quire-block-key-v1"
_TOKEN_BYTES = 4
_SLICE_BLOCKS = 4096  # whose tokens are copied at a time


def root_key(model_fingerprint: str, salt: bytes, resets: int = 0, adapter: bytes = b"") -> bytes:
    """Return the parent of a sequence's first key. Each hashed part is preceded by its length, so that none collide.

    `resets` counts the resets of the prefix cache: sequences from before a reset never match sequences after it.
    `adapter` is reserved for the SHA-256 of a LoRA adapter's weights: empty, as it is today, it changes no key.
    """
    assert len(adapter) in (0, KEY_BYTES), "as long as no count of resets"
    digest = sha256(_SCHEME)
    parts = [model_fingerprint.encode(), salt]
    if resets:
        parts.append(resets.to_bytes(8, "little"))
    if adapter:
        parts.append(adapter)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the key of a full block with `token_ids`, each below 2**31, that follows the block with key `parent`."""
    if isinstance(token_ids, array) and token_ids.typecode == "i":
        return sha256(parent + token_ids.tobytes()).digest()
    return sha256(parent + _packer(len(token_ids)).pack(*token_ids)).digest()


def block_keys(parent: bytes, token_ids: Sequence[int], block_size: int) -> Iterator[bytes]:
    """Yield the keys of the full blocks of `token_ids`, in order, that follow the block with key `parent`.

    An array of C ints is the fastest.
    """
    if isinstance(token_ids, array) and token_ids.typecode == "i":
        width = _TOKEN_BYTES * block_size
        for first in range(0, len(token_ids), _SLICE_BLOCKS * block_size):
            tokens = token_ids[first : first + _SLICE_BLOCKS * block_size].tobytes()
            for start in range(0, len(tokens) - width + 1, width):
                parent = sha256(parent + tokens[start : start + width]).digest()
                yield parent
    else:
        pack = _packer(block_size).pack
        for start in range(0, len(token_ids) - block_size + 1, block_size):
            parent = sha256(parent + pack(*token_ids[start : start + block_size])).digest()
            yield parent


def prefix_keys(parent: bytes, token_ids: Sequence[int], block_size: int) -> Iterator[bytes]:
    """Yield the keys of a prompt's blocks that may be cache hits: at least the last token is left to compute."""
    return islice(block_keys(parent, token_ids, block_size), max(0, len(token_ids) - 1) // block_size)


@cache
def _packer(tokens: int) -> Struct:
    return Struct(f"={tokens}i")
