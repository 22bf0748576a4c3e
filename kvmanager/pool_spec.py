"""What an engine says of its pool when it registers it."""

from dataclasses import dataclass

from kvmanager.errors import InvalidRegistration

# Ids are 32 bits on the wire, and a pool keeps some hundred bytes for each block.
LARGEST_TIER = 1 << 24
LARGEST_BLOCK = 1 << 16
# Tokens that a sequence can have room for: counts are 32 bits on the wire.
LARGEST_ROOM = (1 << 31) - 1
# Names stand in messages of errors, which go into headers.
LONGEST_NAME = 200


@dataclass(frozen=True)
class PoolSpec:
    """What an engine says of its pool. Raises InvalidRegistration, naming the field, where a pool cannot be so."""

    engine_id: str
    incarnation: int
    model_fingerprint: str
    block_size: int
    device_blocks: int
    host_blocks: int = 0
    model: str = ""  # its name, for people

    def __post_init__(self) -> None:
        if not self.engine_id:
            raise InvalidRegistration("engine_id is empty")
        for name in ("incarnation", "block_size", "device_blocks"):
            if getattr(self, name) < 1:
                raise InvalidRegistration(f"{name} is {getattr(self, name)}, it must be at least 1")
        for name in ("engine_id", "model", "model_fingerprint"):
            if len(getattr(self, name)) > LONGEST_NAME:
                raise InvalidRegistration(f"{name} has {len(getattr(self, name))} characters, {LONGEST_NAME} at most")
        if self.block_size > LARGEST_BLOCK:
            raise InvalidRegistration(f"block_size is {self.block_size}, it must be at most {LARGEST_BLOCK}")
        if self.host_blocks < 0:
            raise InvalidRegistration(f"host_blocks is {self.host_blocks}, it must not be negative")
        for name in ("device_blocks", "host_blocks"):
            if getattr(self, name) > LARGEST_TIER:
                raise InvalidRegistration(f"{name} is {getattr(self, name)}, it must be at most {LARGEST_TIER}")


def shortened(name: str) -> str:
    """Return a name as it may stand in a message."""
    return name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..."
