"""The machine and the package versions of a measurement. Needs only the standard library."""

import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# The slowest program here is nvidia-smi: some seconds where the driver is loaded for it.
_SECONDS = 20.0


def hardware() -> dict[str, Any]:
    """Describe the CPU, and the GPU if torch is imported and finds one."""
    return {"cpu": _cpu(), "cores": _cores(), "machine": platform.machine()} | _gpu()


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of Python and of the installed ones of these packages."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def output_of(command: list[str], folder: Path | None = None, seconds: float = _SECONDS) -> str | None:
    """Return the output of a program, None if it is missing, fails, takes longer, or no file can be made for it.

    One that cannot be killed, such as nvidia-smi while the driver hangs, is left alone.
    """
    try:
        with tempfile.TemporaryFile("w+", errors="replace") as output:
            process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.DEVNULL)  # noqa: S603
            if _status(process, seconds) != 0:
                return None
            output.seek(0)
            return output.read().strip()
    except OSError:
        return None


def _status(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Return the exit status, None if the program was killed after these seconds."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(1)
        return None


def _gpu() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "gpu_bytes": properties.total_memory,
        "gpu_driver": _driver(),
        "cuda": torch.version.cuda,
    }


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return (output_of(command) or "").partition("\n")[0] or None


def _cpu() -> str:
    for line in _cpuinfo():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def _cores() -> int:
    return sum(line.startswith("processor") for line in _cpuinfo())


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
