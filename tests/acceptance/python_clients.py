"""Runs the checks of Python clients, each in the environment of its lock file. See clients/."""

import subprocess
import tempfile
from pathlib import Path

from tests.acceptance.python_environments import PythonEnvironment

CHECKS = Path(__file__).parent / "clients"
LOCKS = {"newest-openai": CHECKS / "requirements.txt", "openai-2": CHECKS / "requirements-openai-2.txt"}
_OF_OPENAI_2 = ("instructor", "llama_index")


def clients(folder: str) -> list[str]:
    """Return the clients that a folder of clients/ has a check of."""
    return sorted(path.stem.removeprefix("check_") for path in (CHECKS / folder).glob("check_*.py"))


def environment_of(client: str) -> PythonEnvironment:
    """Return a client's environment."""
    name = "openai-2" if client in _OF_OPENAI_2 else "newest-openai"
    return PythonEnvironment(name, LOCKS[name])


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
            [str(environment_of(client).python()), "-m", "pytest", *options, *plugins, check_file],
            env={"PATH": "/usr/bin:/bin", "HOME": tempfile.gettempdir(), **variables},
            capture_output=True,
            text=True,
            check=False,
        )
