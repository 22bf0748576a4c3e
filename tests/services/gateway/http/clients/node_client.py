"""The official Node client, fetched once into the cache; `make npm-clients` does only that."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from services.model_store import default_cache

SCRIPT = Path(__file__).parent / "node" / "client.cjs"
PACKAGE = Path(__file__).parent / "node" / "package.json"


class NoNodeClient(Exception):
    """It cannot be had; the message says why."""


def node_path() -> str:
    """Return where the version that package.json pins is installed. Raises NoNodeClient."""
    if not shutil.which("node") or not shutil.which("npm"):
        raise NoNodeClient("node is not installed: the Node client is not tried")
    version = json.loads(PACKAGE.read_text())["dependencies"]["openai"]
    folder = default_cache().parent / "npm-clients" / f"openai-{version}"
    if not (folder / "node_modules" / "openai").exists():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(PACKAGE, folder)
        install = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"]
        done = subprocess.run(install, cwd=folder, capture_output=True, text=True, check=False, timeout=100)
        if done.returncode:
            raise NoNodeClient(f"npm cannot install the Node client: {done.stderr.strip().splitlines()[:1]}")
    return str(folder / "node_modules")


if __name__ == "__main__":
    try:
        node_path()
    except NoNodeClient as error:
        sys.exit(str(error))
