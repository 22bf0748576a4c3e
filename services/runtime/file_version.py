"""Tells whether a file is still the one that was read."""

from pathlib import Path

FileVersion = tuple[int, ...]


def version_of(*paths: str) -> FileVersion:
    """Return what differs once one of the files was written to or replaced. A file that is not there has a version too.

    Links are followed: Kubernetes replaces the files of a Secret by pointing a link elsewhere.
    """
    return tuple(number for path in paths for number in _version_of(path))


def _version_of(path: str) -> FileVersion:
    try:
        found = Path(path).stat()
    except OSError:
        return (0, 0, 0, 0)
    return (found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
