"""Runs the parts of the check one after the other, each as a process with a time limit, so that failures stay apart."""

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Timer

from bench.report.targets import ROOT


class Part:
    """A process and its children. Its last argument is the descriptor for its notes."""

    def __init__(self, command: Sequence[str]) -> None:
        """Start it."""
        self._notes, written = os.pipe()
        self._process = subprocess.Popen(
            [*command, str(written)], cwd=ROOT, pass_fds=(written,), start_new_session=True
        )
        os.close(written)
        self._over = False

    def follow(self, limit: float, take: Callable[[str], None]) -> str | None:
        """Pass its lines to `take` until it ends, or kill it after `limit` seconds; return the failure, if any."""
        timer = Timer(limit, self.expire)
        timer.start()
        try:
            with os.fdopen(self._notes) as lines:
                for line in lines:
                    take(line)
            status = self._process.wait()
        finally:
            timer.cancel()
            self._kill()
        if self._over:
            return f"killed after {limit:.0f} s"
        return f"ended with {status}" if status else None

    def expire(self) -> None:
        """Kill it at its time limit."""
        self._over = True
        self._kill()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
