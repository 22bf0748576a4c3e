"""The chat templates of model families, from the source package of llama-cpp-python, which collects them."""

import hashlib
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

_PACKAGE = "llama-cpp-python"
_VERSION = "0.3.36"
_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
_FOLDER = Path(__file__).parents[1] / "build" / f"templates-{_VERSION}"
_PART = "/models/templates/"


def published_templates() -> dict[str, str]:
    """Return the sources of the templates by name. Skips the test if the package index cannot be reached."""
    if not _FOLDER.is_dir():
        _fetch()
    return {path.stem: path.read_text() for path in sorted(_FOLDER.glob("*.jinja"))}


def _fetch() -> None:
    partial = _FOLDER.with_suffix(".partial")
    partial.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", _PACKAGE, "-d", str(partial)]
    done = subprocess.run([*command, f"{_PACKAGE}=={_VERSION}"], capture_output=True, text=True, timeout=600)
    if done.returncode:
        pytest.skip(f"{_PACKAGE} {_VERSION} cannot be downloaded: {done.stderr.strip().splitlines()[-1:]}")
    [archive] = partial.glob("*.tar.gz")
    assert hashlib.sha256(archive.read_bytes()).hexdigest() == _SHA256, "another package than the one that was read"
    with tarfile.open(archive) as package:
        for member in package:
            if _PART in member.name and (content := package.extractfile(member)):
                (partial / Path(member.name).name).write_bytes(content.read())
    archive.unlink()
    partial.rename(_FOLDER)
