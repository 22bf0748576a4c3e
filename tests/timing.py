"""Tests on machines that are slow or pause: attempts and stopped processes."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import psutil

from tests.faults import wait_until

Result = TypeVar("Result")

_ATTEMPTS = 10
_LOOK_SECONDS = 0.05


def in_time(attempt: Callable[[], Result | None], what: str) -> Result:
    """Return the result of the first attempt that was in time; an attempt that was too late returns None."""
    for _ in range(_ATTEMPTS):
        if (result := attempt()) is not None:
            return result
    raise AssertionError(f"not in {_ATTEMPTS} attempts: {what}")


@contextmanager
def standing_still(pid: int) -> Iterator[None]:
    """Stop a process inside the context: whatever it had begun, it ends no earlier than after that."""
    process, over = psutil.Process(pid), threading.Event()

    def stopped() -> bool:
        process.suspend()
        return process.status() == psutil.STATUS_STOPPED

    def keep() -> None:
        """Stop it again, should anybody else continue it, until it is dead."""
        with suppress(psutil.NoSuchProcess):
            while not over.wait(_LOOK_SECONDS):
                process.suspend()

    keeper = threading.Thread(target=keep)
    try:
        wait_until(stopped, "it stands still")
        keeper.start()
        yield
    finally:
        over.set()
        if keeper.ident is not None:
            keeper.join()
        with suppress(psutil.NoSuchProcess):
            process.resume()
