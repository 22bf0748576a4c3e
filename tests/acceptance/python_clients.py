"""Installs clients of Python in environments of their own, and runs their checks. See clients/.

QUIRE_NEWEST_CLIENTS=1 installs the newest versions instead of those of the lock files.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import venv
from functools import cache
from pathlib import Path

from services.models.model_store import default_cache

CHECKS = Path(__file__).parent / "clients"
LOCKS = {"newest-openai": CHECKS / "requirements.txt", "openai-2": CHECKS / "requirements-openai-2.txt"}
NEWEST = os.environ.get("QUIRE_NEWEST_CLIENTS") == "1"
_OF_OPENAI_2 = ("instructor", "llama_index")
_COMMENT = "#"


def clients(folder: str) -> list[str]:
    """Return the clients that a folder of clients/ has a check of."""
    return sorted(path.stem.removeprefix("check_") for path in (CHECKS / folder).glob("check_*.py"))


def asked(lock: Path) -> dict[str, str]:
    """Return the packages of the first block of a lock file, with their extras, and their versions."""
    block = lock.read_text().split("\n\n")[0].splitlines()
    pairs = [line.split("==") for line in block if not line.startswith(_COMMENT)]
    return dict(pairs)


@cache
def clients_python(name: str) -> Path:
    """Return the interpreter of an environment. Raises CalledProcessError if it cannot be made."""
    lock = LOCKS[name]
    version = ".".join(map(str, sys.version_info[:2]))
    kind = "newest" if NEWEST else hashlib.sha256(lock.read_bytes()).hexdigest()[:12]
    folder = default_cache().parent / "python-clients" / f"{version}-{name}-{kind}"
    python, complete = folder / "bin" / "python", folder / "complete"
    if NEWEST or not complete.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        venv.create(folder, with_pip=True, clear=True)
        what = [*asked(lock)] if NEWEST else ["--no-deps", "-r", str(lock)]
        options = ["-q", "--disable-pip-version-check", "--no-compile", *what]
        subprocess.run([str(python), "-m", "pip", "install", *options], check=True)
        complete.touch()
    return python


def versions(name: str) -> dict[str, str]:
    """Return the installed versions of the packages that an environment is for."""
    command = [str(clients_python(name)), "-m", "pip", "freeze", "--disable-pip-version-check"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    installed = dict(line.split("==") for line in lines if "==" in line)
    names = [one.split("[")[0] for one in asked(LOCKS[name])]
    return {one: installed.get(one) or installed[one.replace("-", "_")] for one in names}


def environment_of(client: str) -> str:
    """Return the name of a client's environment."""
    return "openai-2" if client in _OF_OPENAI_2 else "newest-openai"


def run_checks(check: str, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the tests of one client, such as `demo/openai`, apart from the project's own settings of pytest."""
    folder, _, client = check.partition("/")
    check_file = str(CHECKS / folder / f"check_{client}.py")
    with tempfile.NamedTemporaryFile(suffix=".ini") as settings:
        settings.write(b"[pytest]\npython_files = check_*.py\n")
        settings.flush()
        options = ["-c", settings.name, "--rootdir", str(CHECKS), "--confcutdir", str(CHECKS), "-q", "--tb=short"]
        plugins = ["-p", "no:cacheprovider", "-p", "no:langsmith_plugin"]
        return subprocess.run(
            [str(clients_python(environment_of(client))), "-m", "pytest", *options, *plugins, check_file],
            env={"PATH": "/usr/bin:/bin", "HOME": tempfile.gettempdir(), **variables},
            capture_output=True,
            text=True,
            check=False,
        )
