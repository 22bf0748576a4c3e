"""The result of checking a tier."""

from typing import NamedTuple


class BlockFault(NamedTuple):
    """An inconsistency in the records of a tier. `block` is 0 if the fault concerns no single block."""

    block: int
    message: str
