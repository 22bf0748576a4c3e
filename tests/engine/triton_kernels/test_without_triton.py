"""Triton is only needed on GPUs: without it everything else works."""

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


def test_only_the_triton_backend_needs_triton() -> None:
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = [{str(root)!r}, {str(root / 'protos')!r}]{SCRIPT}"]
    ended = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
