"""Runs the parts of the check one after the other, each as a process with a time limit, so that failures stay apart."""

import io
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from bench.report.targets import ROOT

_MARK = "QUIRE_GPU_CHECK_PART"
# A process in a system call of the driver ends only when the call does, and a GPU that hangs may never return.
_END_SECONDS = 10.0
_LOOK_SECONDS = 0.5
# What a part may take beyond its limit.
END_SECONDS = _END_SECONDS + _LOOK_SECONDS
# Ends a part when standard input ends, as it does however this process ends.
_GUARD = (
    "import sys; from bench.gpu_check.processes import kill_all; sys.stdin.read(); kill_all(int(sys.argv[1]), {!r})"
)


class _Output(io.FileIO):
    """Drops what cannot be written: the loss of a terminal, a pipe or a disk's space ends no measurement."""

    def write(self, data: Any, /) -> int:
        """Return the bytes written or dropped."""
        try:
            written = super().write(data)
        except OSError:
            written = None
        return memoryview(data).nbytes if written is None else written


def bear_lost_output() -> None:
    """Let all that this process prints be lost without an error, where it cannot be written."""
    for name in ("stdout", "stderr"):
        file = getattr(sys, name)
        if file is not None and file is getattr(sys, f"__{name}__"):
            buffer = io.BufferedWriter(_Output(file.fileno(), "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(buffer, file.encoding, "backslashreplace", line_buffering=True))


class Part:
    """A process and its children. Its last argument is the descriptor for its notes."""

    def __init__(self, command: Sequence[str]) -> None:
        """Start it."""
        self._notes, written = os.pipe()
        self._mark = uuid4().hex
        self._over = False
        try:
            self._process = subprocess.Popen(
                [*command, str(written)],
                cwd=ROOT,
                pass_fds=(written,),
                start_new_session=True,
                env={**os.environ, _MARK: self._mark},
            )
        except OSError:
            os.close(self._notes)
            raise
        finally:
            os.close(written)
        self._guard = subprocess.Popen(
            [sys.executable, "-c", _GUARD.format(self._mark), str(self._process.pid)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def follow(self, limit: float, take: Callable[[str], None]) -> str | None:
        """Pass its lines to `take` until it ends, or kill it after `limit` seconds; return the failure, if any."""
        until = time.monotonic() + limit
        try:
            self._read(until, take)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, until - time.monotonic()))
            self._over = self._over or self._process.returncode is None
        finally:
            ended = self._end()
        self._read(time.monotonic() + _LOOK_SECONDS, take)
        os.close(self._notes)
        if self._over:
            return f"killed after {limit:.0f} s" + ("" if ended else ", but it does not end")
        return f"ended with {self._process.returncode}" if self._process.returncode else None

    def expire(self) -> None:
        """Kill it at its time limit."""
        self._over = True
        kill_all(self._process.pid, self._mark)

    def _read(self, until: float, take: Callable[[str], None]) -> None:
        """Pass lines on until there are no more: after the end of a process, a child may keep the descriptor open."""
        pending = b""
        while (left := until - time.monotonic()) > 0:
            if readable(self._notes, min(left, _LOOK_SECONDS)):
                if not (read := os.read(self._notes, 1 << 16)):
                    return
                *lines, pending = (pending + read).split(b"\n")
                for line in lines:
                    take(line.decode(errors="replace") + "\n")
            elif self._process.poll() is not None:
                return

    def _end(self) -> bool:
        """Kill all of it, and return whether it has ended."""
        kill_all(self._process.pid, self._mark)
        self._guard.kill()
        self._guard.communicate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        return self._process.returncode is not None


def readable(descriptor: int, seconds: float) -> bool:
    """Return whether the descriptor becomes readable in this time; it may be above 1,023, which `select` refuses."""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        return bool(selector.select(seconds))


def kill_all(leader: int, mark: str) -> None:
    """Kill a part: its group, and all that have its mark, because its children may be in sessions of their own."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
    for number in _marked(mark):
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


def _marked(mark: str) -> Iterator[int]:
    variable = f"{_MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if variable in (folder / "environ").read_bytes():
                yield int(folder.name)
