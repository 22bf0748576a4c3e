"""Detects changes of files."""

from pathlib import Path

FileVersion = tuple[int, ...]


def version_of(*paths: str) -> FileVersion:
    """Return a value that changes when one of the files is written or replaced. Missing files have a version too.

    It follows links, because Kubernetes replaces the files of a Secret by changing a link.
    """
    return tuple(number for path in paths for number in _version_of(path))


def _version_of(path: str) -> FileVersion:
    try:
        found = Path(path).stat()
    except OSError:
        return (0, 0, 0, 0)
    return (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
