"""Runs a compiler that ends with this process, however this process ends."""

import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

# The shell leads a process group. Its standard input closes when this process ends, or gives up; then the whole group
# ends (g++ alone would leave cc1plus running, and removes its own temporary files at SIGTERM), and the folder goes.
_GUARD = r"""
exec 3<&0
folder=$1
shift
(
    trap "" TERM
    read -r _ <&3
    kill -TERM 0
    rm -rf -- "$folder"
    rmdir -- "${folder%/*}" 2>/dev/null
) &
guard=$!
"$@" 3<&- </dev/null
status=$?
kill -KILL $guard
exit $status
"""


def run_compiler(command: Sequence[str], folder: Path, seconds: float) -> tuple[int, str]:
    """Run a compiler that writes into `folder`; return its exit status and its errors.

    If this process ends meanwhile, the compiler ends, too, and the folder is removed, as is the one around it if that
    is empty then. Raises OSError or subprocess.TimeoutExpired.
    """
    guarded = ["sh", "-c", _GUARD, "sh", str(folder), *command]
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        with subprocess.Popen(  # noqa: S603 - a compiler, with arguments that are all ours
            guarded, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
        ) as process:
            status = process.wait(seconds)
        errors.seek(0)
        return status, errors.read()
