"""Attempts of tests on slow machines, and stopped processes."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import psutil

from tests.faults import wait_until

Result = TypeVar("Result")

_ATTEMPTS = 10
_POLL_SECONDS = 0.05


def in_time(attempt: Callable[[], Result | None], what: str) -> Result:
    """Return the result of the first attempt in time; a late attempt returns None."""
    for _ in range(_ATTEMPTS):
        if (result := attempt()) is not None:
            return result
    raise AssertionError(f"not in {_ATTEMPTS} attempts: {what}")


@contextmanager
def standing_still(pid: int) -> Iterator[None]:
    """Stop a process inside the context."""
    process, over = psutil.Process(pid), threading.Event()

    def stopped() -> bool:
        process.suspend()
        return process.status() == psutil.STATUS_STOPPED

    def keep() -> None:
        """Stop it again if another process continues it."""
        with suppress(psutil.NoSuchProcess):
            while not over.wait(_POLL_SECONDS):
                process.suspend()

    keeper = threading.Thread(target=keep)
    try:
        wait_until(stopped, "the process is stopped")
        keeper.start()
        yield
    finally:
        over.set()
        if keeper.ident is not None:
            keeper.join()
        with suppress(psutil.NoSuchProcess):
            process.resume()
