"""Kernels compiled in advance, as in the image."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from engine.native import prebuilt
from engine.native.build import build, sealed
from engine.native.cpu_class import CLASSES, CpuClass, KernelsUnavailable, select
from services.engine.startup.native_kernels import kernels_for
from tests.engine.native_kernels import FOLDER

ROOT = Path(__file__).parents[3]
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

    def compile_own(one: CpuClass, library: Path, _seconds: float) -> None:
        library.write_bytes(build(FOLDER, cpu).read_bytes() if one == cpu else sealed(b""))

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


def test_a_damaged_library_is_not_used(folder: Path, tmp_path: Path, cpu: CpuClass) -> None:
    library = prebuilt.find(cpu, folder)
    (tmp_path / library.name).write_bytes(library.read_bytes()[:-1])
    with pytest.raises(KernelsUnavailable, match=f"{library.name}, compiled in advance, is damaged"):
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


def test_a_wheel_contains_the_libraries_that_were_compiled_before(tmp_path: Path) -> None:
    source, wheels = tmp_path / "source", tmp_path / "wheels"
    ignored = shutil.ignore_patterns("__pycache__", "prebuilt", "*.egg-info")
    for name in ("blocks", "engine", "kvmanager", "protos", "services"):
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    libraries = {f"engine/native/prebuilt/{one.name}-0.so" for one in CLASSES}
    for library in libraries:
        path = source / library
        path.parent.mkdir(exist_ok=True)
        path.touch()
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", wheels, source]
    subprocess.run(command, check=True)
    (wheel,) = wheels.glob("quire-*.whl")
    assert set(zipfile.ZipFile(wheel).namelist()) >= {
        *libraries,
        "engine/native/x86/kernels.cpp",
        "engine/native/x86/attention/layer.h",
    }
