"""Compiles the kernels, once for each class of CPUs, compiler and version of the source."""

import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from engine.native.compiler import run_compiler
from engine.native.cpu_class import CLASSES, CpuClass, KernelsUnavailable

_SOURCE = Path(__file__).parent / "x86" / "kernels.cpp"  # includes the others: a single translation unit
_COMPILERS = ("g++", "c++", "clang++")
# Infinities must work, because masked scores are minus infinity.
_FLAGS = (
    *("-std=c++20", "-O3", "-ffast-math", "-fno-finite-math-only"),
    *("-shared", "-fPIC", "-fvisibility=hidden", "-pthread"),
)
_SECONDS = 120
# Nothing waits for kernels that are compiled in advance, perhaps on a busy machine.
ADVANCE_SECONDS = 900
_DIGEST_BYTES = 32


def build(folder: Path, cpu: CpuClass, compiling: Callable[[], None] = lambda: None) -> Path:
    """Return the shared library of a class, compiling it into `folder` if it is missing or damaged (up to a minute).

    `compiling` is called before it is compiled. Raises KernelsUnavailable.
    """
    library = folder / f"{cpu.name}-{_key(_compiler())}.so"
    if not is_intact(library):
        compiling()
        folder.mkdir(parents=True, exist_ok=True)
        compile_for(cpu, library)
    return library


def compile_for(cpu: CpuClass, library: Path, seconds: float = _SECONDS) -> None:
    """Compile the build of a class into an existing folder. Raises KernelsUnavailable."""
    with tempfile.TemporaryDirectory(dir=library.parent) as unfinished:
        output = Path(unfinished) / library.name
        _compile([_compiler(), *_FLAGS, *cpu.flags, str(_SOURCE), "-o", str(output)], output.parent, seconds)
        output.write_bytes(sealed(output.read_bytes()))
        output.replace(library)  # atomic, so that no process loads an incomplete file


def sealed(content: bytes) -> bytes:
    """Return a library's content with its digest at the end, which the system's loader ignores."""
    return content + hashlib.sha256(content).digest()


def is_intact(library: Path) -> bool:
    """Return whether a library exists and ends with its digest: code of a truncated file would end the process."""
    try:
        content = library.read_bytes()
    except OSError:
        return False
    return content == sealed(content[:-_DIGEST_BYTES])


def source_digest() -> "hashlib._Hash":
    """Return a digest of the sources and of the flags of all classes."""
    digest = hashlib.sha256(_SOURCE.read_bytes())
    for header in sorted(_SOURCE.parent.rglob("*.h")):
        digest.update(header.read_bytes())
    digest.update(" ".join([*_FLAGS, *(flag for one in CLASSES for flag in one.flags)]).encode())
    return digest


def _compiler() -> str:
    compiler = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise KernelsUnavailable(f"no C++ compiler was found: none of {', '.join(_COMPILERS)}")
    return compiler


def _key(compiler: str) -> str:
    """Return a digest of everything the library depends on besides its class: source, flags and compiler."""
    digest = source_digest()
    digest.update(" ".join((compiler, _version(compiler))).encode())
    return digest.hexdigest()[:20]


def _version(compiler: str) -> str:
    try:
        done = subprocess.run(  # noqa: S603 - a compiler, with arguments that are all ours
            [compiler, "--version"], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelsUnavailable(f"{compiler} did not run: {error}") from error
    _check(compiler, done.returncode, done.stderr)
    return done.stdout


def _compile(command: list[str], folder: Path, seconds: float) -> None:
    try:
        status, errors = run_compiler(command, folder, seconds)
    except subprocess.TimeoutExpired as error:
        raise KernelsUnavailable(f"{command[0]} did not end within {seconds:g} s") from error
    except OSError as error:
        raise KernelsUnavailable(f"{command[0]} did not run: {error}") from error
    _check(command[0], status, errors)


def _check(compiler: str, status: int, errors: str) -> None:
    if status:
        lines = errors.strip().splitlines() or [f"exit status {status}"]
        raise KernelsUnavailable(f"{compiler} failed: {next((one for one in lines if 'error' in one), lines[-1])}")
