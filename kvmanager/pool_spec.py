"""What an engine says of its pool when it registers it."""

from dataclasses import dataclass

from kvmanager.errors import InvalidRegistration

# Ids are 32 bits on the wire, and a pool keeps some hundred bytes for each block.
LARGEST_TIER = 1 << 24


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
        if self.host_blocks < 0:
            raise InvalidRegistration(f"host_blocks is {self.host_blocks}, it must not be negative")
        for name in ("device_blocks", "host_blocks"):
            if getattr(self, name) > LARGEST_TIER:
                raise InvalidRegistration(f"{name} is {getattr(self, name)}, it must be at most {LARGEST_TIER}")
