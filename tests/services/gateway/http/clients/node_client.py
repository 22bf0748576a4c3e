"""Installs the clients for Node once into the cache, also by `make npm-clients`, and runs their checks.

QUIRE_NEWEST_CLIENTS=1 installs the newest versions instead of those of package-lock.json.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from services.models.model_store import default_cache

SCRIPT = Path(__file__).parent / "node" / "client.cjs"
CLIENTS = Path(__file__).parents[4] / "acceptance" / "clients"
CHECKS = CLIENTS / "node"
PACKAGE, LOCK = CHECKS / "package.json", CHECKS / "package-lock.json"
NEWEST = os.environ.get("QUIRE_NEWEST_CLIENTS") == "1"
_OPTIONS = ("--no-audit", "--no-fund", "--ignore-scripts")


class NoNodeClient(Exception):
    """The clients cannot be installed."""


def asked() -> dict[str, str]:
    """Return the packages that are asked for, and their versions."""
    found: dict[str, str] = json.loads(PACKAGE.read_text())["dependencies"]
    return found


@cache
def node_path() -> str:
    """Return the node_modules folder with the versions of package-lock.json. Raises NoNodeClient."""
    if not shutil.which("node") or not shutil.which("npm"):
        raise NoNodeClient("node or npm is not installed")
    kind = "newest" if NEWEST else hashlib.sha256(LOCK.read_bytes()).hexdigest()[:12]
    folder = default_cache().parent / "npm-clients" / kind
    if NEWEST or not (folder / "node_modules" / "openai").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        _install(folder)
    return str(folder / "node_modules")


def versions() -> dict[str, str]:
    """Return the installed versions of the packages that are asked for. Raises NoNodeClient."""
    folder = Path(node_path())
    return {name: json.loads((folder / name / "package.json").read_text())["version"] for name in asked()}


def run_check(check: str, variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the tests of one file, in a folder where its packages are found. Raises NoNodeClient."""
    packages = node_path()
    with tempfile.TemporaryDirectory() as place:
        for file in (*CHECKS.glob("*.mjs"), CLIENTS / "conversation.json"):
            shutil.copy(file, place)
        (Path(place) / "node_modules").symlink_to(packages)
        return subprocess.run(
            ["node", "--test", "--test-reporter=spec", f"{check}.mjs"],
            cwd=place,
            env={"PATH": os.environ["PATH"], "HOME": place, **variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )


def _install(folder: Path) -> None:
    # Installed elsewhere and renamed, so that an existing folder is always complete.
    with tempfile.TemporaryDirectory(dir=folder.parent) as place:
        new = Path(place) / "new"
        new.mkdir()
        if NEWEST:
            command = ["npm", "install", "--no-package-lock", *_OPTIONS, *[f"{name}@latest" for name in asked()]]
        else:
            shutil.copy(PACKAGE, new)
            shutil.copy(LOCK, new)
            command = ["npm", "ci", *_OPTIONS]
        try:
            done = subprocess.run(command, cwd=new, capture_output=True, text=True, check=False, timeout=300)
        except subprocess.TimeoutExpired as error:
            raise NoNodeClient("npm timed out while it installed the clients") from error
        if done.returncode:
            raise NoNodeClient(f"npm cannot install the clients: {done.stderr.strip().splitlines()[:1]}")
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)


if __name__ == "__main__":
    try:
        node_path()
    except NoNodeClient as error:
        sys.exit(str(error))
