"""Installs OpenAI's Node client once into the cache, also by `make npm-clients`."""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from services.models.model_store import default_cache

SCRIPT = Path(__file__).parent / "node" / "client.cjs"
PACKAGE = Path(__file__).parent / "node" / "package.json"


class NoNodeClient(Exception):
    """The Node client cannot be installed."""


def node_path() -> str:
    """Return the node_modules folder with the version pinned in package.json. Raises NoNodeClient."""
    if not shutil.which("node") or not shutil.which("npm"):
        raise NoNodeClient("node or npm is not installed")
    version = json.loads(PACKAGE.read_text())["dependencies"]["openai"]
    folder = default_cache().parent / "npm-clients" / f"openai-{version}"
    if not (folder / "node_modules" / "openai").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        _install(folder)
    return str(folder / "node_modules")


def _install(folder: Path) -> None:
    # Installed elsewhere and renamed, so that an existing folder is always complete.
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        new = Path(place) / "new"
        new.mkdir()
        shutil.copy(PACKAGE, new)
        command = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"]
        try:
            done = subprocess.run(command, cwd=new, capture_output=True, text=True, check=False, timeout=100)
        except subprocess.TimeoutExpired as error:
            raise NoNodeClient("npm install of the Node client timed out") from error
        if done.returncode:
            raise NoNodeClient(f"npm cannot install the Node client: {done.stderr.strip().splitlines()[:1]}")
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)


if __name__ == "__main__":
    try:
        node_path()
    except NoNodeClient as error:
        sys.exit(str(error))
