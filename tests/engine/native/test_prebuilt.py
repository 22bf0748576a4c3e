"""Kernels compiled in advance, as in the image."""

from pathlib import Path

import pytest
import torch

from engine.native import prebuilt
from engine.native.build import compile_for
from engine.native.cpu_class import CLASSES, CpuClass, KernelsUnavailable, select
from services.engine.startup.native_kernels import kernels_for

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def cpu() -> CpuClass:
    try:
        return select()
    except KernelsUnavailable as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def folder(cpu: CpuClass, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the real library for this CPU, and empty files for other classes."""
    made = tmp_path_factory.mktemp("prebuilt") / "made"

    def compile_own(one: CpuClass, library: Path) -> None:
        compile_for(one, library) if one == cpu else library.touch()

    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(prebuilt, "compile_for", compile_own)
            prebuilt.compile_all(made)
    except KernelsUnavailable as missing:
        pytest.skip(f"the native kernels cannot be built: {missing}")
    return made


@pytest.mark.parametrize("one", CLASSES, ids=lambda one: one.name)
def test_each_class_has_its_library(folder: Path, one: CpuClass) -> None:
    assert prebuilt.find(one, folder).name.startswith(f"{one.name}-")


def test_a_library_of_other_sources_is_not_used(folder: Path, tmp_path: Path, cpu: CpuClass) -> None:
    library = prebuilt.find(cpu, folder)
    (tmp_path / library.name.replace(library.stem.rpartition("-")[2], "0" * 20)).write_bytes(library.read_bytes())
    with pytest.raises(KernelsUnavailable, match=f"no kernels were compiled in advance for class {cpu.name}"):
        prebuilt.find(cpu, tmp_path)


def test_without_a_compiler_prebuilt_kernels_are_used(
    folder: Path, tmp_path: Path, cpu: CpuClass, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(prebuilt.find, "__defaults__", (folder,))
    folder_of_builds = str(tmp_path / "kernels")
    assert kernels_for("torch", CPU, folder_of_builds) is None
    assert kernels_for("auto", torch.device("meta"), folder_of_builds) is None
    found = kernels_for("cpu", CPU, folder_of_builds)
    assert found is not None
    assert found.cpu == cpu
