"""Children of this process that run Python: they import nothing from the current folder.

Services that are children read the environment variables.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Environment variable: the service stops when its standard input is closed by the parent process.
STOP_WITH_STDIN = "QUIRE_STOP_WITH_STDIN"
# Environment variable: a file descriptor that receives the address once the service is ready. Logs can be too late
# or filtered.
READY_DESCRIPTOR = "QUIRE_READY_DESCRIPTOR"
# Environment variable: the path of a memory that an engine's blocks outlive it in, held by this parent process.
KEPT_MEMORY = "QUIRE_KEPT_MEMORY"
# Environment variable of Python: children inherit it.
_SAFE_PATH = "PYTHONSAFEPATH"


def python_command(*arguments: str) -> list[str]:
    """Return the command of a child that runs this interpreter with these arguments."""
    return [sys.executable, "-P", *arguments]


@contextmanager
def safe_path() -> Iterator[None]:
    """Protect the children that start meanwhile, for a library that makes their command, such as multiprocessing."""
    before = os.environ.get(_SAFE_PATH)
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SAFE_PATH]
        else:
            os.environ[_SAFE_PATH] = before
