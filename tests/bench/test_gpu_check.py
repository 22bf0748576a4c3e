"""Parts of `make gpu-check` that crash or hang. tests/gpu_check runs the real parts."""

import sys

import pytest
import torch

from bench.gpu_check import __main__ as check
from bench.gpu_check.notes import Result
from bench.gpu_check.processes import Part

NEVER = 3600.0
ROW = '{"row": {"metric": "m", "value": 1.0, "unit": "s", "peer": null, "target": null, "met": null}}'


def part(then: str) -> Part:
    """Make a part that writes a row and then runs a statement."""
    program = (
        f"import os, signal, subprocess, sys, time\nnotes = int(sys.argv[-1])\nos.write(notes, b'{ROW}\\n')\n{then}"
    )
    return Part([sys.executable, "-c", program])


@pytest.mark.parametrize(
    ("then", "failure"),
    [
        ("", None),
        ("sys.exit(3)", "ended with 3"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended with -11"),
        ("""os.write(notes, b'{"row": {"metr'); sys.exit(1)""", "ended with 1"),
    ],
)
def test_a_part_keeps_its_rows_however_it_ends(then: str, failure: str | None) -> None:
    result = Result()
    assert part(then).follow(NEVER, result.take) == failure
    assert [row.metric for row in result.rows] == ["m"]


def test_a_part_beyond_its_time_is_killed_with_its_child_processes() -> None:
    child = "subprocess.Popen(['sleep', '3600'], pass_fds=(notes,)); time.sleep(3600)"
    hanging, result = part(child), Result()

    def take(line: str) -> None:
        result.take(line)
        hanging.expire()

    # The child process also holds the descriptor open, so `follow` returns only after its end.
    assert hanging.follow(NEVER, take) == "killed after 3600 s"
    assert [row.metric for row in result.rows] == ["m"]


def test_failures_are_reported_by_name() -> None:
    result = Result()
    result.take('{"failure": ["flex", "RuntimeError: no"]}\n')
    result.take('{"raw": ["uniform", {"paged": [1.0]}]}\n')
    assert result.failures == {"flex": "RuntimeError: no"}
    assert result.raw == {"uniform": {"paged": [1.0]}}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_message_names_the_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.gpu_check"])
    with pytest.raises(SystemExit, match="DRY=1"):
        check.main()
