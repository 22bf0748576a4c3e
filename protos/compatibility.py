"""Checks that the protos break nothing that the descriptors of releases promise, with `buf breaking`.

`released/` has the descriptors of each release, and `released/exceptions.toml` the deliberate breaks. At a release,
`python protos/compatibility.py --release` writes the descriptors of the version in pyproject.toml.
"""

import argparse
import json
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

PROTOS = Path(__file__).resolve().parent
RELEASED = PROTOS / "released"
# Names, also in JSON and generated code, numbers, types, labels, oneofs, streaming, packages and reserved fields.
_CONFIG = json.dumps({"version": "v2", "breaking": {"use": ["FILE"]}})
_BREAKS_FOUND = 100  # exit status of buf


@dataclass(frozen=True, order=True)
class Break:
    """A promise of a release that the protos break: the release, buf's rule, and what changed."""

    release: str
    rule: str
    change: str

    def __str__(self) -> str:
        return f"{self.change} ({self.rule}, since {self.release})"


def main() -> None:
    """Check the protos, or write the descriptors of a release."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--release", action="store_true", help="Write the descriptors of this version.")
    if parser.parse_args().release:
        version = tomllib.loads((PROTOS.parent / "pyproject.toml").read_text())["project"]["version"]
        write_descriptors(PROTOS, RELEASED / f"{version}.binpb")
    elif faults := check(PROTOS, RELEASED):
        sys.exit("\n".join(["the protos differ from what releases promise:", *faults]))


def check(protos: Path, released: Path) -> list[str]:
    """Return a sentence for each break that is no exception, and for each exception that does not apply."""
    exceptions = released / "exceptions.toml"
    allowed = _read_exceptions(exceptions)
    found = {one for release in sorted(released.glob("*.binpb")) for one in breaks(protos, release)}
    unused = [f"{exceptions.name}: this exception does not apply: {one}" for one in sorted(allowed - found)]
    return [str(one) for one in sorted(found - allowed)] + unused


def breaks(protos: Path, release: Path) -> list[Break]:
    """Return the promises of a release that the protos break."""
    against = ("--against", str(release.resolve()), "--against-config", _CONFIG)
    done = _buf(protos, "breaking", ".", *against, "--error-format", "json")
    if done.returncode not in (0, _BREAKS_FOUND):
        sys.exit(f"buf failed: {done.stdout}{done.stderr}")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return [Break(release.stem, line["type"], line["message"]) for line in lines]


def write_descriptors(protos: Path, target: Path) -> None:
    """Write the descriptors of a release, unless they exist: a release does not change."""
    if target.exists():
        sys.exit(f"{target.name} exists: a release does not change")
    done = _buf(protos, "build", ".", "--exclude-source-info", "-o", str(target.resolve()))
    if done.returncode:
        sys.exit(f"buf failed: {done.stderr}")


def _buf(protos: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [str(Path(sys.executable).with_name("buf")), *arguments, "--config", _CONFIG]
    return subprocess.run(command, cwd=protos, text=True, capture_output=True, check=False)  # noqa: S603 - buf


def _read_exceptions(path: Path) -> set[Break]:
    entries = tomllib.loads(path.read_text()).get("exception", [])
    for entry in entries:
        if entry.keys() != {"release", "rule", "change", "reason"} or not all(entry.values()):
            sys.exit(f"{path.name}: an exception has release, rule, change and reason, none of them empty: {entry}")
    return {Break(entry["release"], entry["rule"], entry["change"]) for entry in entries}


if __name__ == "__main__":
    main()
