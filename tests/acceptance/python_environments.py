"""Environments of Python for foreign packages: made from lock files, and kept beside the downloaded models.

A lock file has two blocks: what is asked for, with versions, and what that needs. QUIRE_NEWEST_CLIENTS=1 installs the
newest versions of the first block instead.
"""

import hashlib
import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

from services.models.model_store import default_cache

NEWEST = os.environ.get("QUIRE_NEWEST_CLIENTS") == "1"
_COMMENT = "#"
_QUIET = "--disable-pip-version-check"
_made: set[Path] = set()


def asked(lock: Path) -> dict[str, str]:
    """Return the packages of the first block of a lock file, with their extras, and their versions."""
    block = lock.read_text().split("\n\n")[0].splitlines()
    pairs = [line.split("==") for line in block if not line.startswith(_COMMENT)]
    return dict(pairs)


@dataclass(frozen=True)
class PythonEnvironment:
    """An environment of the packages in a lock file; `name` is for people."""

    name: str
    lock: Path

    def python(self) -> Path:
        """Return its interpreter, after making it if needed. Raises CalledProcessError if it cannot be made."""
        folder = self._folder()
        if folder not in _made:
            if NEWEST or not (folder / "complete").exists():
                self._make(folder)
            _made.add(folder)
        return folder / "bin" / "python"

    def command(self, name: str) -> Path:
        """Return an installed command. Raises CalledProcessError if the environment cannot be made."""
        return self.python().with_name(name)

    def versions(self) -> dict[str, str]:
        """Return the installed versions of the packages that it is for."""
        command = [str(self.python()), "-m", "pip", "freeze", _QUIET]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        installed = dict(line.split("==") for line in lines if "==" in line)
        names = [one.split("[")[0] for one in asked(self.lock)]
        return {one: installed.get(one) or installed[one.replace("-", "_")] for one in names}

    def _folder(self) -> Path:
        version = ".".join(map(str, sys.version_info[:2]))
        kind = "newest" if NEWEST else hashlib.sha256(self.lock.read_bytes()).hexdigest()[:12]
        return default_cache().parent / f"python-{self.lock.parent.name}" / f"{version}-{self.name}-{kind}"

    def _make(self, folder: Path) -> None:
        folder.parent.mkdir(parents=True, exist_ok=True)
        venv.create(folder, with_pip=True, clear=True)
        what = [*asked(self.lock)] if NEWEST else ["--no-deps", "-r", str(self.lock)]
        options = ["-q", _QUIET, "--no-compile", *what]
        subprocess.run([str(folder / "bin" / "python"), "-m", "pip", "install", *options], check=True)
        (folder / "complete").touch()
