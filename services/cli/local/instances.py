"""Addresses of this user's running `quire serve` instances: a file for each, in the runtime folder.

A file is locked while its process runs, so that the file of a killed process is detected even if its process id is
reused.
"""

import fcntl
import json
import os
import stat
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

# Names another folder than the user's, as QUIRE_CACHE does for models.
FOLDER_VARIABLE = "QUIRE_RUNTIME"
_MOST_BYTES = 64 * 1024
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


class NoSuchInstance(Exception):
    """No `quire serve` of that name runs, or one runs already."""


@dataclass(frozen=True)
class Instance:
    """One `quire serve`: its name, its process, when it was ready (seconds since 1970), and its services' addresses."""

    name: str
    gateway: str
    kvmanager: str
    engines: list[str]
    pid: int = field(default_factory=os.getpid)
    ready_at: float = field(default_factory=time.time)


def folder() -> Path:
    """Return the folder with the files, which may not be there."""
    if given := os.environ.get(FOLDER_VARIABLE):
        return Path(given)
    import platformdirs

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that XDG_RUNTIME_DIR is not set: then it is a folder below /tmp
        return platformdirs.user_runtime_path("quire")


@contextmanager
def published(instance: Instance) -> Iterator[None]:
    """Publish an instance to other commands. Raises OSError, and NoSuchInstance if its name is in use."""
    if taken := [one for one in running() if one.name == instance.name]:
        raise NoSuchInstance(f"a `quire serve` named {instance.name} is already running, as process {taken[0].pid}")
    place = folder()
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_private(place):
        raise PermissionError(f"{place} belongs to another user, or others may write into it")
    descriptor, path = tempfile.mkstemp(dir=place, prefix="serve-", suffix=".new")
    visible = Path(path).with_suffix(".json")
    with os.fdopen(descriptor, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            json.dump(asdict(instance), file)
            file.flush()
            Path(path).rename(visible)
            yield
        finally:
            visible.unlink(missing_ok=True)
            Path(path).unlink(missing_ok=True)


def running() -> list[Instance]:
    """Return the running instances, newest first. Removes files of ended processes."""
    place = folder()
    if not _is_private(place):
        return []
    found = [_read(path) for path in place.glob("serve-*.json")]
    return sorted((one for one in found if one), key=lambda one: one.ready_at, reverse=True)


def find(name: str = "") -> Instance | None:
    """Return the newest instance, or the one called `name`. Raises NoSuchInstance for an unknown name."""
    instances = running()
    if not name:
        return instances[0] if instances else None
    for one in instances:
        if one.name == name:
            return one
    others = ", ".join(one.name for one in instances)
    running_now = f"; running: {others}" if others else ""
    raise NoSuchInstance(f"--instance: no `quire serve` named {name} is running{running_now}")


def reachable(address: str) -> str:
    """Return the address to connect to for a listening address: wildcard addresses become loopback."""
    for everywhere, here in (("0.0.0.0:", "127.0.0.1:"), ("[::]:", "[::1]:")):
        if address.startswith(everywhere):
            return here + address.removeprefix(everywhere)
    return address


def _is_private(place: Path) -> bool:
    """Return True if only this user can write there: API keys are sent to the addresses of these files."""
    try:
        facts = place.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & _OTHERS_MAY_WRITE


def _read(path: Path) -> Instance | None:
    try:
        with path.open() as file:
            if _is_unlocked(file.fileno()):
                path.unlink(missing_ok=True)
                return None
            return Instance(**json.loads(file.read(_MOST_BYTES)))
    except (OSError, ValueError, TypeError):  # removed meanwhile, or of another version
        return None


def _is_unlocked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
