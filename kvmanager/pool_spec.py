"""What an engine says of its pool when it registers it."""

from dataclasses import dataclass

from kvmanager.errors import InvalidRegistration

# Ids are 32 bits on the wire, and a pool keeps some hundred bytes for each block.
MAX_TIER_BLOCKS = 1 << 24
MAX_BLOCK_SIZE = 1 << 16
# Tokens that a sequence can have room for: counts are 32 bits on the wire.
MAX_ROOM_TOKENS = (1 << 31) - 1
# Names stand in messages of errors, which go into headers.
MAX_NAME_LENGTH = 200


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
            length = len(getattr(self, name))
            if length > MAX_NAME_LENGTH:
                raise InvalidRegistration(f"{name} must have at most {MAX_NAME_LENGTH} characters, not {length}")
        if self.block_size > MAX_BLOCK_SIZE:
            raise InvalidRegistration(f"block_size is {self.block_size}, it must be at most {MAX_BLOCK_SIZE}")
        if self.host_blocks < 0:
            raise InvalidRegistration(f"host_blocks is {self.host_blocks}, it must not be negative")
        for name in ("device_blocks", "host_blocks"):
            if getattr(self, name) > MAX_TIER_BLOCKS:
                raise InvalidRegistration(f"{name} is {getattr(self, name)}, it must be at most {MAX_TIER_BLOCKS}")


def truncated(name: str) -> str:
    """Return a name as it may stand in a message."""
    return name if len(name) <= MAX_NAME_LENGTH else f"{name[:MAX_NAME_LENGTH]}..."
