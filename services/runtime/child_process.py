"""Children of this process that run Python: they import nothing from the current folder."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

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
