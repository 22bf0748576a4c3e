"""Last step of the image's build: removes unused files, and compiles the modules that services import.

`python finish.py FOLDER` works on its own environment. It writes the bytecode below FOLDER, which
PYTHONPYCACHEPREFIX names, that of the standard library included. Rarely imported modules get none and are compiled in
memory. Equal environments give equal files.
"""

import compileall
import importlib
import os
import pkgutil
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path
from py_compile import PycInvalidationMode

PACKAGES = Path(sysconfig.get_path("purelib"))
OWN = ("blocks", "kvmanager", "engine", "services", "quire")
# An engine imports these once its model is known; most models have Llama's architecture.
LOADED_LATER = (
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.models.llama.tokenization_llama",
    "transformers.generation.utils",
    "transformers.tokenization_utils_tokenizers",
)
TESTED_ELSEWHERE = ("numpy", "sympy", "networkx", "mpmath")
NEEDED_OF_TORCHS_PROGRAMS = "torch_shm_manager"


def main(folder: str) -> None:
    """Trim the environment, compile imported modules into `folder`, and give all files the same date."""
    check_version(os.environ.get("VERSION") or "")
    trim()
    # Imports happen in another process, because interned objects of this one would change the bytecode.
    command = [sys.executable, __file__, folder, "--list"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)  # noqa: S603
    files = done.stdout.split()
    for file in files:
        if not compileall.compile_file(file, quiet=1, invalidation_mode=PycInvalidationMode.UNCHECKED_HASH):
            sys.exit(f"{file} cannot be compiled")
    date = int(os.environ.get("SOURCE_DATE_EPOCH") or 0)
    for path in sorted(Path(sys.prefix).rglob("*")):
        os.utime(path, (date, date), follow_symlinks=False)


def check_version(label: str) -> None:
    """Exit unless the version that the image's label will have is Quire's."""
    if label and label != version("quire"):
        sys.exit(f"VERSION is {label}, but this is Quire {version('quire')}")


def trim() -> None:
    """Remove pip, tests and test programs, unreached models, and headers from images without a compiler."""
    # In another process, as all imports of what is compiled here.
    subprocess.run([sys.executable, Path(__file__).with_name("trim_transformers.py")], check=True)  # noqa: S603
    for path in (*PACKAGES.glob("pip"), *PACKAGES.glob("pip-*.dist-info"), *Path(sys.prefix, "bin").glob("pip*")):
        _remove(path)
    torch = PACKAGES / "torch"
    for program in (torch / "bin").iterdir():
        if program.name != NEEDED_OF_TORCHS_PROGRAMS:
            _remove(program)
    _remove(torch / "test")
    if os.environ.get("TORCH_BUILD") == "cpu":
        _remove(torch / "include")
        _remove(torch / "share")
    for package in TESTED_ELSEWHERE:
        for tests in sorted((PACKAGES / package).rglob("tests")):
            _remove(tests)
    for cache in sorted(Path(sys.prefix).rglob("__pycache__")):
        _remove(cache)


def imported() -> list[str]:
    """Import all of Quire; return the sorted files of all loaded modules."""
    names = [*LOADED_LATER, *OWN, "encodings.idna"]
    for package in OWN:
        paths = importlib.import_module(package).__path__
        names += [found.name for found in pkgutil.walk_packages(paths, f"{package}.", onerror=lambda _: None)]
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:  # its packages are in the GPU image only
            sys.stderr.write(f"{name} is left out: {error}\n")
    found = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return sorted(file for file in found if file and file.endswith(".py") and file != __file__)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    if sys.argv[2:] == ["--list"]:
        sys.stdout.write("\n".join(imported()))
    else:
        main(sys.argv[1])
