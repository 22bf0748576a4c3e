"""Keys of full blocks: what a block's contents are a function of.

K and V at a position depend on all tokens up to it, so a block's key is a hash chained over its parent's key and its
own tokens. The chain starts from the model's fingerprint and the tenant's salt: two blocks have equal keys only where
the same model computed the same tokens for requests that may share.
"""

import hashlib
from array import array
from collections.abc import Sequence

KEY_BYTES = 32
_SCHEME = b"quire-block-key-v1"


def root_key(model_fingerprint: str, salt: bytes) -> bytes:
    """Return the parent of a sequence's first key. Each part is preceded by its length, so no two pairs collide."""
    digest = hashlib.sha256(_SCHEME)
    for part in (model_fingerprint.encode(), salt):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def block_key(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the key of the full block that holds `token_ids` (each below 2**31) after the block of key `parent`."""
    return hashlib.sha256(parent + array("i", token_ids).tobytes()).digest()
