"""What makes tests hold on a machine that is slow, or stands still for moments."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import psutil

from tests.faults import wait_until

Result = TypeVar("Result")

_ATTEMPTS = 10


def in_time(attempt: Callable[[], Result | None], what: str) -> Result:
    """Return what the first attempt brings that came in time; None says that one was too late, and proves nothing."""
    for _ in range(_ATTEMPTS):
        if (result := attempt()) is not None:
            return result
    raise AssertionError(f"not in {_ATTEMPTS} attempts: {what}")


@contextmanager
def standing_still(pid: int) -> Iterator[None]:
    """Stop a process inside the context: whatever it had begun, it ends no earlier than after that."""
    process = psutil.Process(pid)

    def stopped() -> bool:
        process.suspend()
        return process.status() == psutil.STATUS_STOPPED

    try:
        wait_until(stopped, "it stands still")
        yield
    finally:
        with suppress(psutil.NoSuchProcess):
            process.resume()
