"""A Python with the packages that docs/benchmarking.md names for `make gpu-check`, what they need, and no others."""

import sys
import venv
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

DOCUMENTED = ("torch", "triton", "grpcio", "protobuf", "transformers", "numpy", "xxhash", "pytest")


def make_bare_environment(folder: Path, *more: str) -> Path:
    """Create it from links to what is installed here, with further packages, and return its Python."""
    venv.create(folder, symlinks=True)
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    for found in closure([*DOCUMENTED, *more]).values():
        _link(found, packages)
    return folder / "bin" / "python"


def closure(names: Iterable[str]) -> dict[str, Distribution]:
    """Return the distributions with these names and all that they require here, without extras."""
    found: dict[str, Distribution] = {}
    left = list(names)
    while left:
        name = left.pop().lower().replace("_", "-")
        if name not in found:
            try:
                found[name] = distribution(name)
            except PackageNotFoundError:  # required on other platforms
                continue
            needs = [Requirement(one) for one in found[name].requires or ()]
            left += [one.name for one in needs if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


def _link(found: Distribution, packages: Path) -> None:
    """Link a package as a whole; of a namespace such as `google`, which several share, its parts."""
    files = [file for file in found.files or () if file.parts[0] not in ("..", "__pycache__")]
    whole = {file.parts[0] for file in files if len(file.parts) < 3 and file.name == "__init__.py"}
    for file in files:
        top = file.parts[0]
        depth = 1 if top in whole or len(file.parts) == 1 or top.endswith(".dist-info") else 2
        target = packages.joinpath(*file.parts[:depth])
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(str(found.locate_file("/".join(file.parts[:depth]))))
