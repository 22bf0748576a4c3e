"""The command loads Quire's packages, whatever else has their names."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NAMES = ("blocks", "engine", "kvmanager", "services", "quire")


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A folder with other packages of these names."""
    for name in NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('a package of somebody else')")
    return tmp_path


def run(command: Path, python_path: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    with begin(command, python_path, *arguments) as process:
        output, errors = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def begin(command: Path, python_path: Path, *arguments: str) -> "subprocess.Popen[str]":
    path = os.pathsep.join((str(python_path), str(ROOT / "protos"), os.environ.get("PYTHONPATH", "")))
    line = [sys.executable, str(command), *arguments]
    environment = {**os.environ, "PYTHONPATH": path}
    pipe = subprocess.PIPE
    return subprocess.Popen(line, cwd=python_path, env=environment, text=True, stdout=pipe, stderr=pipe)


def test_packages_of_the_same_names_on_the_path_are_not_imported(foreign: Path) -> None:
    done = run(ROOT / "start_quire.py", foreign, "generate", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Continue PROMPT" in done.stdout


def test_a_script_that_is_called_quire_is_not_imported(tmp_path: Path) -> None:
    (tmp_path / "quire.py").write_text("raise SystemExit('a script of a user')")
    done = run(ROOT / "start_quire.py", tmp_path, "generate", "--help")
    assert (done.returncode, done.stderr) == (0, "")


def test_processes_that_it_starts_import_quires_packages_too(foreign: Path) -> None:
    launcher = foreign / "launcher.py"
    launcher.write_text(
        f"""
import contextlib, subprocess, sys
sys.path.insert(0, {str(ROOT)!r})
sys.argv = ["quire", "--version"]
import start_quire
with contextlib.suppress(SystemExit):
    start_quire.main()
files = "import quire, services; print(quire.__file__, services.__file__)"
subprocess.run([sys.executable, "-P", "-c", files], check=True)
"""
    )
    done = run(launcher, foreign)
    files = ROOT / "protos" / "quire" / "__init__.py", ROOT / "services" / "__init__.py"
    assert done.stdout.splitlines()[-1] == " ".join(map(str, files))


def test_a_package_that_another_distribution_overwrote_is_named(foreign: Path) -> None:
    shutil.copy(ROOT / "start_quire.py", foreign)
    done = run(foreign / "start_quire.py", foreign)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(
        f"quire: the package 'blocks' in {foreign.resolve()} is not Quire's: another installed"
    )
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("module", "command"), [("/click/__init__.py", "pins"), ("/commands/serve.py", "serve")])
def test_ctrl_c_during_an_import_ends_it_without_a_message(tmp_path: Path, module: str, command: str) -> None:
    """The import of all commands, and that of one."""
    hook = f"""
import sys, time
def wait(event, values):
    if event == "exec" and values[0].co_filename.endswith({module!r}):
        print("waiting", flush=True)
        time.sleep(60)
sys.addaudithook(wait)
"""
    (tmp_path / "sitecustomize.py").write_text(hook)
    with begin(ROOT / "start_quire.py", tmp_path, command) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate()[1] == ""
    assert process.returncode == 130
