"""The tests that use a GPU, on one."""

import re
import subprocess
import sys
from collections import Counter

from bench.gpu_check import DRY
from bench.gpu_check.notes import Notes
from bench.report.targets import ROOT

TABLE = "tests/engine/attention/test_backends.py"
OTHERS = tuple(f"tests/engine/gpu/test_{name}.py" for name in ("gpu_decoder", "copy_stream", "gpu_ranks"))
# Files and tests that run at the same time, since the compilation of kernels takes most of the time.
SUITE: list[tuple[tuple[str, ...], str]] = [
    *(
        ((TABLE,), f"(triton or flex) and {dtype} and not compiled")
        for dtype in ("float32", "bfloat16", "torch.float16")
    ),
    *(((TABLE,), "compiled"), (OTHERS, "")),
]
# Enough to check that tests are found, run and counted: `make test` runs all of them without a GPU.
SMALL_SUITE: list[tuple[tuple[str, ...], str]] = [(OTHERS, "normalized and 64")]


def measure(notes: Notes) -> None:
    """Run the tests, and write their counts by result."""
    counts: Counter[str] = Counter()
    for tests in [_started(*part) for part in (SMALL_SUITE if DRY else SUITE)]:
        with notes.kept("tests"):
            output, _ = tests.communicate()
            print(output[-3000:], flush=True)
            for count, name in re.findall(r"(\d+) (passed|failed|skipped|error)", output):
                counts[name] += int(count)
            assert tests.returncode == 0, f"pytest ended with {tests.returncode}"
    for name, count in counts.items():
        notes.row(f"tests_{name}", count, "tests")


def _started(files: tuple[str, ...], which: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", which]
    # Options of missing plugins, and warnings of older Triton interpreters about NumPy.
    command += ["-W", "ignore::pytest.PytestConfigWarning", "-W", "ignore::DeprecationWarning"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
