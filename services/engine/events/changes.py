"""What changes in the keys that a prompt can hit, as plain values."""

from array import array
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple


class Medium(Enum):
    """A tier, by vLLM's name. `GPU` is the tier that steps read, whatever the device."""

    GPU = "GPU"
    CPU = "CPU"


class KeyPlace(NamedTuple):
    """Where a key has blocks: the number of the kind, and the tier."""

    kind: int
    medium: Medium


class Stored(NamedTuple):
    """Keys of one chain that a place has now, each the parent of the next.

    `parent` is the key before the first one, None at the beginning of a prompt. `tokens` has those of each block as C
    ints, which the garbage collector does not traverse. `salt` is a digest of the chain's salt, empty without a salt.
    """

    place: KeyPlace
    parent: bytes | None
    keys: Sequence[bytes]
    tokens: Sequence[bytes]
    salt: str

    @property
    def token_ids(self) -> "array[int]":
        """The tokens of all blocks, one after the other."""
        return array("i", b"".join(self.tokens))


class Removed(NamedTuple):
    """Keys that a place has no longer, or that no prompt reaches any more because a block before them is gone."""

    place: KeyPlace
    keys: Sequence[bytes]


class Cleared(NamedTuple):
    """No place has a key any more."""


KeyChange = Stored | Removed | Cleared
