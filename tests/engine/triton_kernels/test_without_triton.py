"""Triton is there for GPUs: where it is not installed, everything else runs as before."""

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import sys
sys.modules["triton"] = None  # as if it were not installed
import engine.attention, engine.native.cpu_backend, engine.attention.interface, engine.run.runner
import services.engine.startup.assembly
assert not any(name.startswith("engine.triton_kernels") for name in sys.modules)
"""


def test_what_does_not_choose_the_triton_backend_does_not_need_triton() -> None:
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(root)!r}, {str(root / 'protos')!r}]{SCRIPT}"]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
