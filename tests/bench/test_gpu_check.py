"""Parts of `make gpu-check` that crash or hang. tests/gpu_check runs the real parts."""

import fcntl
import io
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench.gpu_check import __main__ as check
from bench.gpu_check import probe, run
from bench.gpu_check.budgets import Deadline
from bench.gpu_check.notes import Notes, Result
from bench.gpu_check.parts import tests as suite
from bench.gpu_check.processes import Part, readable
from services.loadgen.report import machine
from tests.faults import wait_until

NEVER = 3600.0
ROW = '{"row": {"metric": "m", "value": 1.0, "unit": "s", "peer": null, "target": null, "met": null}}'


def part(then: str) -> Part:
    """Make a part that writes a row and then runs a statement."""
    program = (
        f"import os, signal, subprocess, sys, time\nnotes = int(sys.argv[-1])\nos.write(notes, b'{ROW}\\n')\n{then}"
    )
    return Part([sys.executable, "-c", program])


def test_descriptors_that_select_refuses_are_read_too() -> None:
    read, written = os.pipe()
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    high = fcntl.fcntl(read, fcntl.F_DUPFD, 1024)
    try:
        assert not readable(high, 0)
        os.write(written, b"a")
        assert readable(high, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
        for descriptor in (high, read, written):
            os.close(descriptor)


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


@pytest.mark.parametrize("ignoring", ["'trap : TERM HUP INT; sleep 3600'", "'setsid sleep 3600'"])
def test_child_processes_that_ignore_signals_or_leave_the_group_are_killed_too(ignoring: str, tmp_path: Path) -> None:
    child = tmp_path / "child"
    started = (
        f"one = subprocess.Popen(['setsid', 'sh', '-c', {ignoring}]); print(one.pid, file=open({str(child)!r}, 'w'))"
    )
    assert part(started).follow(NEVER, lambda _: None) is None
    wait_until(lambda: has_ended(child.read_text()), "its end")


def has_ended(number: str) -> bool:
    try:
        return "State:\tZ" in Path(f"/proc/{int(number)}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_a_part_that_ends_while_a_child_keeps_its_notes_open_does_not_take_its_whole_time() -> None:
    child = "subprocess.Popen(['setsid', 'sleep', '3600'], pass_fds=(notes,))"
    result = Result()
    assert part(child).follow(NEVER, result.take) is None
    assert [row.metric for row in result.rows] == ["m"]


def test_a_part_that_closes_its_notes_and_goes_on_is_killed_at_its_time() -> None:
    assert part("os.close(notes); time.sleep(3600)").follow(1.5, lambda _: None) == "killed after 2 s"


def test_a_part_that_the_killed_check_leaves_behind_is_killed(tmp_path: Path) -> None:
    """SIGKILL gives the check no chance to end its parts, which would compute beside the next check."""
    started, apart = tmp_path / "part", tmp_path / "apart"
    hanging = textwrap.dedent(f"""
        import os, subprocess, time
        child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
        print(child.pid, file=open({str(apart)!r}, "w"), flush=True)
        print(os.getpid(), file=open({str(started)!r}, "w"), flush=True)
        time.sleep(3600)
    """)
    program = textwrap.dedent(f"""
        import sys
        from bench.gpu_check.processes import Part
        Part([sys.executable, "-c", {hanging!r}]).follow(3600, print)
    """)
    running = subprocess.Popen([sys.executable, "-c", program])
    wait_until(lambda: started.exists() and started.read_text().endswith("\n"), "a part runs")
    running.kill()
    running.wait()
    wait_until(lambda: has_ended(started.read_text()), "its end")
    wait_until(lambda: has_ended(apart.read_text()), "the end of its child in another session")


def test_results_are_kept_though_the_disk_is_full_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = [True]

    def write(*_: object, **more: object) -> None:
        if full:
            full.pop()
            raise OSError("No space left on device")

    class Noted:
        def __init__(self, command: list[str]) -> None:
            self.name = command[3]

        def follow(self, _: float, take: Callable[[str], None]) -> None:
            take(ROW.replace('"m"', f'"{self.name}"') + "\n")

    monkeypatch.setattr(run, "write", write)
    monkeypatch.setattr(run, "Part", Noted)
    made = run.Check({"ceilings": 1.0, "llama": 1.0}, 60.0, time.monotonic(), tmp_path, {})
    made.run()
    assert [row.metric for row in made.result.rows] == ["ceilings", "llama"]
    assert made.lost is None


def test_a_part_that_cannot_be_started_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.sys, "executable", "/nowhere/python")
    made = run.Check({"ceilings": 1.0, "llama": 1.0}, 60.0, time.monotonic(), tmp_path, {})
    made.run()
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert written["failures"].keys() == {"ceilings", "llama"}
    assert "No such file" in written["failures"]["llama"]
    assert "gpu_after_llama" in written["raw"]


def test_a_driver_that_hangs_ends_the_check_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_PROGRAM", "import time; time.sleep(3600)")
    with pytest.raises(SystemExit, match="within 0 s: see nvidia-smi"):
        probe.hardware(0.1)


def test_a_program_that_takes_too_long_has_no_output() -> None:
    assert machine.output_of(["sleep", "3600"], seconds=0.1) is None
    assert machine.output_of(["sh", "-c", "echo out; exit 1"]) is None
    assert machine.output_of(["echo", "out"]) == "out"


def test_output_that_is_no_text_or_has_no_place_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.output_of(["printf", r"a\377b"]) == "a\ufffdb"

    def full(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(machine.tempfile, "TemporaryFile", full)
    assert machine.output_of(["echo", "out"]) is None


def test_failures_are_reported_by_name() -> None:
    result = Result()
    result.take('{"failure": ["flex", "RuntimeError: no"]}\n')
    result.take('{"raw": ["uniform", {"paged": [1.0]}]}\n')
    result.take("Segmentation fault\n")
    assert result.failures == {"flex": "RuntimeError: no", "notes": "this is no note: 'Segmentation fault\\n'"}
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
        (["--parts", "llama,lama"], "argument --parts: there is no part 'lama'; they are ceilings, exactness, start,"),
        (["--parts", ""], "argument --parts: there is no part ''; they are ceilings, "),
        (["--results", "{file}"], "--results: no file can be written in {file}: File exists"),
        (["--results", "{file}/below"], "--results: no file can be written in {file}/below: Not a directory"),
        (["--results", "/proc/none"], "--results: no file can be written in /proc/none: "),
        (["--results", "a\0b"], "--results: no file can be written in a\0b: "),
        (["--results", ""], "argument --results: must name a folder"),
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
    monkeypatch.setattr(run, "Part", None)
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

    monkeypatch.setattr(run, "Part", Noted)
    monkeypatch.setattr(probe, "hardware", dict)
    command = ["bench.gpu_check", "--parts", "sampler,llama"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit):
        check.main()
    assert "argument --parts: give --results too" in capsys.readouterr().err
    assert not started
    monkeypatch.setattr(check, "DRY", True)
    monkeypatch.setattr(sys, "argv", [*command, "--results", str(tmp_path / "new")])
    check.main()
    assert started == ["llama", "110", "sampler", "540"]
    assert (tmp_path / "new").is_dir()


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGHUP])
def test_a_check_that_is_ended_leaves_no_part_behind(ending: int, tmp_path: Path) -> None:
    """A part that went on would compute beside the next check."""
    started = tmp_path / "part"
    program = textwrap.dedent(f"""
        import sys
        from bench.gpu_check import __main__ as check, run
        from bench.gpu_check.processes import Part
        hanging = "import os, sys, time; print(os.getpid(), file=open(sys.argv[1], 'w'), flush=True); time.sleep(3600)"
        run.Part = lambda command: Part([sys.executable, "-c", hanging, {str(started)!r}])
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
    # The guard may end it a moment after the check.
    wait_until(lambda: has_ended(started.read_text()), "the part ends", 30)


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
