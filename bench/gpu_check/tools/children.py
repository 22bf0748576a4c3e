"""Programs that a part runs within its own time, with their output in a file."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from bench.gpu_check.notes import Result
from bench.report.targets import ROOT

PART = (sys.executable, "-m", "bench.gpu_check.part")


def printed_by(command: Sequence[str], seconds: float, environment: Mapping[str, str]) -> tuple[str, int | None]:
    """Return what a program printed, and its status: None if it was killed after these seconds."""
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=dict(environment), stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
        )
        status: int | None = None
        with suppress(subprocess.TimeoutExpired):
            status = process.wait(seconds)
        # What it has started is killed at the end of the part.
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        output.seek(0)
        return output.read(), status


def failures_in(printed: str) -> dict[str, str]:
    """Return the failures among the notes that a part printed."""
    result = Result()
    for line in printed.splitlines(keepends=True):
        if line.startswith('{"failure"'):
            result.take(line)
    return result.failures


def part(name: str, seconds: float, *options: str) -> list[str]:
    """Return the command of a part with its notes among its output."""
    return [*PART, name, str(time.monotonic() + seconds), *options, "1"]
