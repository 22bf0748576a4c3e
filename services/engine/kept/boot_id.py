"""The boot of this machine: memory and monotonic clocks of another one are not comparable."""

from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return what identifies the boot, empty if it is unknown."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
