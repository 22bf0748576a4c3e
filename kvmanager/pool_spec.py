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

_LEAST = {"incarnation": 1, "block_size": 1, "device_blocks": 1, "host_blocks": 0, "started_after_boot": 0}


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
    # The boot of the engine's machine, and the process's start in nanoseconds since then; empty: unknown.
    boot_id: str = ""
    started_after_boot: int = 0

    @property
    def blocks(self) -> int:
        """Number of blocks of both tiers."""
        return self.device_blocks + self.host_blocks

    def precedes(self, other: "PoolSpec") -> bool:
        """Return whether this is an older incarnation of the engine than `other`.

        Two processes of one boot are ordered by its monotonic clock, because the clock of incarnations can be set back.
        """
        if self.incarnation == other.incarnation:
            return False
        if self.boot_id and self.boot_id == other.boot_id and self.started_after_boot != other.started_after_boot:
            return self.started_after_boot < other.started_after_boot
        return self.incarnation < other.incarnation

    def __post_init__(self) -> None:
        if not self.engine_id:
            raise InvalidRegistration("engine_id must not be empty")
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise InvalidRegistration(f"{name} must be at least {least}, not {getattr(self, name)}")
        for name in ("engine_id", "model", "model_fingerprint", "boot_id"):
            length = len(getattr(self, name))
            if length > MAX_NAME_LENGTH:
                raise InvalidRegistration(f"{name} must have at most {MAX_NAME_LENGTH} characters, not {length}")
        if self.block_size > MAX_BLOCK_SIZE:
            raise InvalidRegistration(f"block_size must be at most {MAX_BLOCK_SIZE}, not {self.block_size}")
        for name in ("device_blocks", "host_blocks"):
            if getattr(self, name) > MAX_TIER_BLOCKS:
                raise InvalidRegistration(f"{name} must be at most {MAX_TIER_BLOCKS}, not {getattr(self, name)}")


def truncated(name: str) -> str:
    """Return a name, cut to MAX_NAME_LENGTH characters, for an error message."""
    return name if len(name) <= MAX_NAME_LENGTH else f"{name[:MAX_NAME_LENGTH]}..."
