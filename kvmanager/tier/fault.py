"""What a check of a tier finds."""

from typing import NamedTuple


class BlockFault(NamedTuple):
    """An inconsistency in the records of a tier. `block` is 0 where it is no single one."""

    block: int
    sentence: str
