"""Kernels compiled in advance for machines without a compiler: one library for each class of CPUs.

`python -m engine.native.prebuilt` compiles them into the package, as the image build does.
"""

from pathlib import Path

from engine.native.build import ADVANCE_SECONDS, compile_for, is_intact, source_digest
from engine.native.cpu_class import CLASSES, CpuClass, KernelsUnavailable

FOLDER = Path(__file__).with_name("prebuilt")


def compile_all(folder: Path = FOLDER) -> list[Path]:
    """Compile the library of each class into a folder, and return them. Raises KernelsUnavailable."""
    folder.mkdir(parents=True, exist_ok=True)
    for one in CLASSES:
        if is_intact(folder / library_of(one)):
            continue
        compile_for(one, folder / library_of(one), ADVANCE_SECONDS)
    return [folder / library_of(one) for one in CLASSES]


def find(cpu: CpuClass, folder: Path = FOLDER) -> Path:
    """Return the library of a class. Raises KernelsUnavailable if there is none of this version, or a damaged one."""
    library = folder / library_of(cpu)
    if not library.exists():
        raise KernelsUnavailable(f"no kernels were compiled in advance for class {cpu.name}")
    if not is_intact(library):
        raise KernelsUnavailable(f"{library.name}, compiled in advance, is damaged")
    return library


def library_of(cpu: CpuClass) -> str:
    """Return the name of the library of a class, for the sources as they are."""
    return f"{cpu.name}-{source_digest().hexdigest()[:20]}.so"


if __name__ == "__main__":
    for made in compile_all():
        print(made)  # noqa: T201 - output of the image build
