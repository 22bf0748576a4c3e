"""Children of this process that run Python: they import nothing from the current folder."""

import os
import sys

# Environment variable of Python: children inherit it.
_SAFE_PATH = "PYTHONSAFEPATH"


def python_command(*arguments: str) -> list[str]:
    """Return the command of a child that runs this interpreter with these arguments."""
    return [sys.executable, "-P", *arguments]


def use_safe_path() -> None:
    """Protect also the children whose command a library makes, such as multiprocessing."""
    os.environ[_SAFE_PATH] = "1"
