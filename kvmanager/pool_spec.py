"""The properties of a pool that its engine registers."""

from dataclasses import dataclass

from kvmanager.errors import InvalidRegistration

# Ids have 32 bits on the wire, and a pool uses some hundred bytes for each block.
MAX_TIER_BLOCKS = 1 << 24
MAX_BLOCK_SIZE = 1 << 16
# Room of one sequence in tokens: counts have 32 bits on the wire.
MAX_ROOM_TOKENS = (1 << 31) - 1
# Error messages contain names and are sent as headers, which must be short.
MAX_NAME_LENGTH = 200


@dataclass(frozen=True)
class PoolSpec:
    """The properties of a pool. Raises InvalidRegistration, naming the field, if one is out of range."""

    engine_id: str
    incarnation: int
    model_fingerprint: str
    block_size: int
    device_blocks: int
    host_blocks: int = 0
    model: str = ""  # display name

    def __post_init__(self) -> None:
        if not self.engine_id:
            raise InvalidRegistration("engine_id must not be empty")
        for name in ("incarnation", "block_size", "device_blocks"):
            if getattr(self, name) < 1:
                raise InvalidRegistration(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("engine_id", "model", "model_fingerprint"):
            length = len(getattr(self, name))
            if length > MAX_NAME_LENGTH:
                raise InvalidRegistration(f"{name} must have at most {MAX_NAME_LENGTH} characters, not {length}")
        if self.block_size > MAX_BLOCK_SIZE:
            raise InvalidRegistration(f"block_size must be at most {MAX_BLOCK_SIZE}, not {self.block_size}")
        if self.host_blocks < 0:
            raise InvalidRegistration(f"host_blocks must be at least 0, not {self.host_blocks}")
        for name in ("device_blocks", "host_blocks"):
            if getattr(self, name) > MAX_TIER_BLOCKS:
                raise InvalidRegistration(f"{name} must be at most {MAX_TIER_BLOCKS}, not {getattr(self, name)}")


def truncated(name: str) -> str:
    """Return a name, cut to MAX_NAME_LENGTH characters, for an error message."""
    return name if len(name) <= MAX_NAME_LENGTH else f"{name[:MAX_NAME_LENGTH]}..."
