"""Reads files that people name, up to a bound: a device may never end."""

import errno
from pathlib import Path


def read_bytes(path: str | Path, most: int) -> bytes:
    """Read a file of at most `most` bytes. Raises OSError, also for a longer one."""
    with Path(path).open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))
    return content


def read_text(path: str | Path, most: int, encoding: str = "utf-8") -> str:
    """Read a text of at most `most` bytes. Raises OSError, also for a longer one, and UnicodeDecodeError."""
    return read_bytes(path, most).decode(encoding)
