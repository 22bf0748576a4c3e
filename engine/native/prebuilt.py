"""Kernels compiled in advance for machines without a compiler: one library for each supported kind of CPU.

`python -m engine.native.prebuilt` compiles them into the package, as the image build does.
"""

from pathlib import Path
from typing import NamedTuple

from engine.native.build import KernelsUnavailable, compile_for, instructions, source_digest

FOLDER = Path(__file__).with_name("prebuilt")
# The flags of x86-64-v4 in /proc/cpuinfo.
_V4 = frozenset(
    [
        "avx2",
        "bmi1",
        "bmi2",
        "f16c",
        "fma",
        "movbe",
        "abm",
        "xsave",
        "avx512f",
        "avx512bw",
        "avx512cd",
        "avx512dq",
        "avx512vl",
    ]
)


class Kind(NamedTuple):
    """A kind of CPU: its compiler flags, and the required flags of /proc/cpuinfo."""

    name: str
    flags: tuple[str, ...]
    needs: frozenset[str]


# CPUs with bfloat16 products, the best first; other CPUs use torch's operators in float32.
KINDS = (
    Kind(
        "amx",
        ("-march=x86-64-v4", "-mtune=sapphirerapids", "-mavx512bf16", "-mamx-tile", "-mamx-bf16"),
        _V4 | {"avx512_bf16", "amx_tile", "amx_bf16"},
    ),
    Kind("avx512-bf16", ("-march=x86-64-v4", "-mavx512bf16"), _V4 | {"avx512_bf16"}),
)


def compile_all(folder: Path = FOLDER) -> list[Path]:
    """Compile the library of each kind into a folder, and return them. Raises KernelsUnavailable."""
    folder.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        compile_for(kind.flags, folder / _library_of(kind))
    return [folder / _library_of(kind) for kind in KINDS]


def find(folder: Path = FOLDER) -> Path:
    """Return the library for this CPU. Raises KernelsUnavailable if there is none, or only one of another version."""
    here = set(instructions().split())
    for kind in KINDS:
        library = folder / _library_of(kind)
        if kind.needs <= here and library.exists():
            return library
    raise KernelsUnavailable("no kernels were compiled in advance for this CPU")


def _library_of(kind: Kind) -> str:
    return f"{kind.name}-{source_digest().hexdigest()[:20]}.so"


if __name__ == "__main__":
    for made in compile_all():
        print(made)  # noqa: T201 - output of the image build
