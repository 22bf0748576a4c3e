"""`make gpu-check` where there is no GPU: everything that it imports and starts, on small cases."""

import os
import subprocess
import sys
from pathlib import Path

from tests.acceptance.conftest import Record

ROOT = Path(__file__).parents[2]
SECONDS = 300


def test_the_dry_run_imports_runs_and_measures_everything(record: Record) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}"}
    command = [sys.executable, "-m", "bench.gpu_check", "--dry"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    # Its first and its last part, and one with the KV manager in a process of its own.
    for row in ("tests_passed", "decode_of_the", "llama_3_8b_prefi"):
        assert row in done.stdout
    record(rows=done.stdout.count("│ llama") + done.stdout.count("│ decode"))
