"""The properties of a pool that its engine registers."""

from dataclasses import dataclass, replace

from blocks import KIND_0, WindowKind
from kvmanager.errors import InvalidRegistration

# Ids have 32 bits on the wire, and a pool uses some hundred bytes for each block.
MAX_TIER_BLOCKS = 1 << 24
MAX_BLOCK_SIZE = 1 << 16
# Room of one sequence in tokens: counts have 32 bits on the wire.
MAX_ROOM_TOKENS = (1 << 31) - 1
MAX_WINDOW_KINDS = 8
_WINDOW_BOUNDS = (
    ("tokens", 1, MAX_ROOM_TOKENS),
    ("device_blocks", 1, MAX_TIER_BLOCKS),
    ("host_blocks", 0, MAX_TIER_BLOCKS),
    ("layers", 0, 1 << 16),
    ("block_bytes", 0, 1 << 40),
)
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
    windows: tuple[WindowKind, ...] = ()  # the kinds after kind 0, whose blocks are those above
    retention_tokens: int = 0  # window kinds keep what a prompt needs that continues behind a multiple of them; 0: none

    @property
    def blocks(self) -> int:
        """Number of blocks of both tiers and all kinds."""
        return self.device_blocks + self.host_blocks + sum(one.device_blocks + one.host_blocks for one in self.windows)

    @property
    def largest_tier(self) -> str:
        """The field with the number of blocks of the largest tier."""
        tiers = {"device_blocks": self.device_blocks, "host_blocks": self.host_blocks}
        for number, one in enumerate(self.windows):
            tiers |= {
                f"kinds[{number}].device_blocks": one.device_blocks,
                f"kinds[{number}].host_blocks": one.host_blocks,
            }
        return max(tiers, key=tiers.__getitem__)

    def of(self, kind: WindowKind) -> "PoolSpec":
        """Return the properties of a pool that has only the blocks of a window kind."""
        return replace(self, device_blocks=kind.device_blocks, host_blocks=kind.host_blocks, windows=())

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
            raise InvalidRegistration("engine_id", "must not be empty")
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise InvalidRegistration(name, f"must be at least {least}, not {getattr(self, name)}")
        for name in ("engine_id", "model", "model_fingerprint", "boot_id"):
            length = len(getattr(self, name))
            if length > MAX_NAME_LENGTH:
                raise InvalidRegistration(name, f"must have at most {MAX_NAME_LENGTH} characters, not {length}")
        if self.block_size > MAX_BLOCK_SIZE:
            raise InvalidRegistration("block_size", f"must be at most {MAX_BLOCK_SIZE}, not {self.block_size}")
        for name in ("device_blocks", "host_blocks"):
            if getattr(self, name) > MAX_TIER_BLOCKS:
                raise InvalidRegistration(name, f"must be at most {MAX_TIER_BLOCKS}, not {getattr(self, name)}")
        if self.retention_tokens < 0 or self.retention_tokens % self.block_size:
            raise InvalidRegistration(
                "retention_tokens",
                f"must be a multiple of the block size {self.block_size}, not {self.retention_tokens}",
            )
        _check_windows(self.windows)


def _check_windows(windows: tuple[WindowKind, ...]) -> None:
    if len(windows) > MAX_WINDOW_KINDS:
        raise InvalidRegistration("kinds", f"must have at most {MAX_WINDOW_KINDS} entries, not {len(windows)}")
    used = {KIND_0}
    for number, one in enumerate(windows):
        _check_window_name(f"kinds[{number}].name", one.name, used)
        for field, least, most in _WINDOW_BOUNDS:
            if not least <= (value := getattr(one, field)) <= most:
                raise InvalidRegistration(
                    f"kinds[{number}].{field}", f"must be between {least} and {most}, not {value}"
                )


def _check_window_name(field: str, name: str, used: set[str]) -> None:
    """Check a name, and add it to those in use."""
    if not 1 <= len(name) <= MAX_NAME_LENGTH:
        raise InvalidRegistration(field, f"must have between 1 and {MAX_NAME_LENGTH} characters, not {len(name)}")
    if name in used:
        raise InvalidRegistration(field, f"must be another than {name!r}, which is in use")
    used.add(name)


def truncated(name: str) -> str:
    """Return a name, cut to MAX_NAME_LENGTH characters, for an error message."""
    return name if len(name) <= MAX_NAME_LENGTH else f"{name[:MAX_NAME_LENGTH]}..."
