"""Parts of `make gpu-check` that crash or hang. tests/gpu_check runs the real parts."""

import io
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from bench.gpu_check import __main__ as check
from bench.gpu_check.budgets import Deadline
from bench.gpu_check.notes import Notes, Result
from bench.gpu_check.parts import tests as suite
from bench.gpu_check.processes import Part
from tests.faults import wait_until

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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            (["--seconds", text], f"argument --seconds: must be a number above 0, not {text!r}")
            for text in ("nan", "inf", "0", "-5", "1e999", "ten")
        ),
        (["--parts", "llama,lama"], "argument --parts: there is no part 'lama'; they are ceilings, exactness, llama,"),
        (["--parts", ""], "argument --parts: there is no part ''; they are ceilings, "),
        (["--results", "{file}"], "--results: no file can be written in {file}: File exists"),
        (["--results", "{file}/below"], "--results: no file can be written in {file}/below: Not a directory"),
        (["--results", "/proc/none"], "--results: no file can be written in /proc/none: "),
        (["--results", "a\0b"], "--results: no file can be written in a\0b: "),
        (["--dr"], "unrecognized arguments: --dr"),
    ],
)
def test_a_wrong_option_is_named_before_a_part_starts(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr(check, "DRY", True)
    monkeypatch.setattr(check, "Part", None)
    monkeypatch.setattr(sys, "argv", ["bench.gpu_check", *(one.format(file=file) for one in options)])
    with pytest.raises(SystemExit) as ended:
        check.main()
    assert message.format(file=file) in f"{ended.value.code}{capsys.readouterr().err}"


def test_chosen_parts_share_the_time_and_do_not_replace_the_results_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[str] = []

    class Noted:
        def __init__(self, command: list[str]) -> None:
            started.append(command[3])

        def follow(self, limit: float, _: object) -> None:
            started.append(f"{limit:.0f}")

    monkeypatch.setattr(check, "Part", Noted)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    command = ["bench.gpu_check", "--parts", "sampler,llama"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit):
        check.main()
    assert "argument --parts: give --results too" in capsys.readouterr().err
    assert not started
    monkeypatch.setattr(check, "DRY", True)
    monkeypatch.setattr(sys, "argv", [*command, "--results", str(tmp_path / "new")])
    check.main()
    assert started == ["llama", "120", "sampler", "540"]
    assert (tmp_path / "new").is_dir()


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGHUP])
def test_a_check_that_is_ended_leaves_no_part_behind(ending: int, tmp_path: Path) -> None:
    """A part that went on would compute beside the next check."""
    started = tmp_path / "part"
    program = textwrap.dedent(f"""
        import sys
        from bench.gpu_check import __main__ as check
        from bench.gpu_check.processes import Part
        hanging = "import os, sys, time; print(os.getpid(), file=open(sys.argv[1], 'w'), flush=True); time.sleep(3600)"
        check.Part = lambda command: Part([sys.executable, "-c", hanging, {str(started)!r}])
        check.main()
    """)
    running = subprocess.Popen([sys.executable, "-c", program, "--dry"])
    try:
        wait_until(lambda: started.exists() and started.read_text().endswith("\n"), "a part runs")
        running.send_signal(ending)
        assert running.wait(30) == 128 + ending
    finally:
        running.kill()
        running.wait()
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()), 0)


def test_each_selection_of_the_suite_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "ROOT", tmp_path)
    (tmp_path / "test_x.py").write_text("def test_one():\n    assert 0\n\ndef test_two():\n    assert 0\n")
    written = io.StringIO()
    selections: list[suite.Selection] = [(("test_x.py",), "one"), (("test_x.py",), "two"), (("test_x.py",), "")]
    suite.measure(selections, torch.device("cpu"), Notes(written), Deadline(time.monotonic() + 120))
    result = Result()
    for line in io.StringIO(written.getvalue()):
        result.take(line)
    assert result.failures == dict.fromkeys(
        ("tests, one", "tests, two", "tests, test_x"), "AssertionError: pytest ended with 1"
    )
    assert [(row.metric, row.value) for row in result.rows] == [("tests_failed", 4)]
