"""Installs the clients of clients/requirements.txt once, in an environment of their own."""

import hashlib
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from services.models.model_store import default_cache

CHECKS = Path(__file__).parent / "clients"
_REQUIREMENTS = CHECKS / "requirements.txt"


def clients_python() -> Path:
    """Return the interpreter of the environment. Raises CalledProcessError if it cannot be made."""
    version = ".".join(map(str, sys.version_info[:2]))
    digest = hashlib.sha256(_REQUIREMENTS.read_bytes()).hexdigest()[:12]
    folder = default_cache().parent / "python-clients" / f"{version}-{digest}"
    python, complete = folder / "bin" / "python", folder / "complete"
    if not complete.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        venv.create(folder, with_pip=True, clear=True)
        options = ["-q", "--disable-pip-version-check", "--no-compile", "--no-deps", "-r", str(_REQUIREMENTS)]
        subprocess.run([str(python), "-m", "pip", "install", *options], check=True)
        complete.touch()
    return python


def run_checks(name: str, base_url: str) -> subprocess.CompletedProcess[str]:
    """Run the tests of one client with a server, apart from the project's own settings of pytest."""
    with tempfile.NamedTemporaryFile(suffix=".ini") as settings:
        settings.write(b"[pytest]\npython_files = check_*.py\n")
        settings.flush()
        options = ["-c", settings.name, "--rootdir", str(CHECKS), "--confcutdir", str(CHECKS), "-q", "--tb=short"]
        plugins = ["-p", "no:cacheprovider", "-p", "no:langsmith_plugin"]
        return subprocess.run(
            [str(clients_python()), "-m", "pytest", *options, *plugins, str(CHECKS / f"check_{name}.py")],
            env={"BASE_URL": base_url, "PATH": "/usr/bin:/bin", "HOME": tempfile.gettempdir()},
            capture_output=True,
            text=True,
            check=False,
        )
