"""The tests that use a GPU, on one."""

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

import torch

from bench.gpu_check.budgets import Deadline
from bench.gpu_check.notes import Notes
from bench.report.targets import ROOT

TABLE = "tests/engine/attention/test_backends.py"
OTHERS = tuple(f"tests/engine/gpu/test_{name}.py" for name in ("gpu_decoder", "copy_stream", "gpu_ranks"))
Selection = tuple[tuple[str, ...], str]
# Files and tests that run at the same time, since the compilation of kernels takes most of the time.
FULL: list[Selection] = [
    *(
        ((TABLE,), f"(triton or flex) and {dtype} and not compiled")
        for dtype in ("float32", "bfloat16", "torch.float16")
    ),
    *(((TABLE,), "compiled"), (OTHERS, "")),
]
# Enough to check that tests are found, run and counted: `make test` runs all of them without a GPU.
SMALL: list[Selection] = [(OTHERS, "normalized and 64")]


class _Started(NamedTuple):
    process: "subprocess.Popen[str]"
    output: IO[str]


def measure(selections: list[Selection], _: torch.device, notes: Notes, deadline: Deadline) -> None:
    """Run the tests until the deadline, and write their counts by result; those that did not end are failures."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        started = [_start(one, Path(folder), number) for number, one in enumerate(selections)]
        for tests, (files, which) in zip(started, selections, strict=True):
            with notes.kept(f"tests, {which or ' '.join(Path(file).stem for file in files)}"):
                status = _status(tests, deadline)
                printed = Path(tests.output.name).read_text()
                print(printed[-3000:], flush=True)
                counts += counted(printed)
                assert status == 0, "they did not end in time" if status is None else f"pytest ended with {status}"
    for name, count in counts.items():
        notes.row(f"tests_{name}", count, "tests")


def _status(tests: _Started, deadline: Deadline) -> int | None:
    """Wait for the end of tests, or end them at the deadline."""
    status: int | None = None
    with suppress(subprocess.TimeoutExpired):
        status = tests.process.wait(deadline.left())
    tests.process.kill()
    tests.process.wait()
    tests.output.close()
    return status


def counted(printed: str) -> Counter[str]:
    """Return the number of tests by result, from the summary of pytest, or from its dots if there is none."""
    counts: Counter[str] = Counter()
    for count, name in re.findall(r"(\d+) (passed|failed|skipped|error)", printed):
        counts[name] += int(count)
    if not counts:
        marks = "".join(re.findall(r"^([.FEsx]+)", printed, re.MULTILINE))
        counts.update({name: marks.count(mark) for mark, name in ((".", "passed"), ("F", "failed")) if mark in marks})
    return counts


def _start(selection: Selection, folder: Path, number: int) -> _Started:
    files, which = selection
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", which]
    # Options of missing plugins, and warnings of older Triton interpreters about NumPy.
    command += ["-W", "ignore::pytest.PytestConfigWarning", "-W", "ignore::DeprecationWarning"]
    output = (folder / str(number)).open("w")
    # Its default needs the package platformdirs.
    environment = {"QUIRE_CACHE": str(folder / "cache"), **os.environ}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True)
    return _Started(process, output)
