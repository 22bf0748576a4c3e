"""Runs the whole check: tests, kernels, a model. `--dry` does small cases without a GPU, and writes no results."""

import re
import subprocess
import sys
import time
from collections import Counter
from typing import Any

import torch

from bench.gpu_check import DRY, kernels, llama
from bench.gpu_check.timing import Failures
from bench.report import ROOT, Row, print_rows, publish, row

TABLE = "tests/engine/test_backends.py"
OTHERS = ("tests/engine/test_gpu_decoder.py", "tests/engine/test_copy_stream.py")
# Files, and which of their tests: what runs at the same time, since compiling kernels is what takes long.
SUITE = [
    ((TABLE,), f"(triton or flex) and {dtype} and not compiles") for dtype in ("float32", "bfloat16", "torch.float16")
]
SUITE += [((TABLE,), "compiles"), (OTHERS, "")]
# What is enough to see that everything can be imported and runs.
SMALL_SUITE = [
    ((TABLE, *OTHERS), "recorded or triton-torch.bfloat16-16 or flex-torch.float32-16 or normed or gates"),
]
SUITE_SECONDS = 240


def main() -> None:
    """Check and measure; fail where something could not be."""
    if not DRY and not torch.cuda.is_available():
        sys.exit("there is no GPU: with DRY=1 small cases run without one")
    begun = time.monotonic()
    device = torch.device("cpu" if DRY else "cuda")
    failures = Failures()
    suite = _suite(failures)
    rows: list[Row] = [row("gpu", f"tests_{name}", count, "tests") for name, count in suite.items()]
    raw: dict[str, Any] = {}
    with torch.inference_mode():
        for name, part, sizes in (
            ("kernels", kernels, kernels.SMALL if DRY else kernels.FULL),
            ("llama", llama, llama.SMALL if DRY else llama.FULL),
        ):
            with failures.kept(name):
                found, raw[name] = part.measure(sizes, device, failures)  # type: ignore[attr-defined]
                rows += found
            if not DRY:
                torch.cuda.empty_cache()
    if DRY:
        print_rows("gpu, dry: the figures mean nothing", rows)
    else:
        publish("gpu", rows, kernels.FULL.repetitions, raw=raw, failures=failures.found)
    print(f"took {time.monotonic() - begun:.0f} s")
    if failures.found:
        sys.exit("failed: " + "; ".join(f"{part}: {what}" for part, what in failures.found.items()))


def _suite(failures: Failures) -> Counter[str]:
    """Run the tests that have something to do with a GPU; return how many passed, and so on."""
    deadline = time.monotonic() + SUITE_SECONDS
    running = [_tests(*part) for part in (SMALL_SUITE if DRY else SUITE)]
    counts: Counter[str] = Counter()
    for tests in running:
        with failures.kept("tests"):
            said, _ = tests.communicate(timeout=deadline - time.monotonic())
            print(said[-3000:], flush=True)
            for count, name in re.findall(r"(\d+) (passed|failed|skipped|error)", said):
                counts[name] += int(count)
            if tests.returncode:
                failures.found["tests"] = f"pytest ended with {tests.returncode}"
    for tests in running:
        tests.kill()  # those whose time is over
        tests.wait()
    return counts


def _tests(files: tuple[str, ...], which: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", which]
    # Options of plugins that are not here, and what older interpreters of Triton do to NumPy.
    command += ["-W", "ignore::pytest.PytestConfigWarning", "-W", "ignore::DeprecationWarning"]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


if __name__ == "__main__":
    main()
