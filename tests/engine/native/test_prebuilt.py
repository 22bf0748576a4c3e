"""Kernels compiled in advance, as in the image."""

from pathlib import Path

import pytest
import torch

from engine.native import Kernels, KernelsUnavailable, prebuilt
from engine.native.build import compile_for, instructions
from services.engine.startup.native_kernels import kernels_for

CPU = torch.device("cpu")
HERE = set(instructions().split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the real library for this CPU, and empty files for other kinds."""
    made = tmp_path_factory.mktemp("prebuilt") / "made"

    def compile_best(flags: tuple[str, ...], library: Path) -> None:
        compile_for(flags, library) if flags == best else library.touch()

    best = next((kind.flags for kind in prebuilt.KINDS if kind.needs <= HERE), None)
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(prebuilt, "compile_for", compile_best)
            prebuilt.compile_all(made)
    except KernelsUnavailable as missing:
        pytest.skip(f"the native kernels cannot be built: {missing}")
    return made


@pytest.fixture
def capable() -> None:
    if not any(kind.needs <= HERE for kind in prebuilt.KINDS):
        pytest.skip("the CPU has no bfloat16 products")


def on_a_cpu_with(flags: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prebuilt, "instructions", lambda: f"flags\t\t: fpu {' '.join(sorted(flags))}")


@pytest.mark.parametrize("kind", prebuilt.KINDS, ids=lambda kind: kind.name)
def test_the_best_library_for_a_cpu_is_found(
    folder: Path, kind: prebuilt.Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_cpu_with({*kind.needs, "aes"}, monkeypatch)
    assert prebuilt.find(folder).name.startswith(f"{kind.name}-")


@pytest.mark.parametrize("missing", ["avx512_bf16", "avx512vl", "fma"])
def test_none_is_found_for_a_cpu_that_lacks_an_instruction(
    folder: Path, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_cpu_with({flag for kind in prebuilt.KINDS for flag in kind.needs} - {missing}, monkeypatch)
    with pytest.raises(KernelsUnavailable, match="no kernels were compiled in advance for this CPU"):
        prebuilt.find(folder)


def test_a_library_of_other_sources_is_not_used(folder: Path, tmp_path: Path, capable: None) -> None:
    library = prebuilt.find(folder)
    (tmp_path / library.name.replace(library.stem.rpartition("-")[2], "0" * 20)).write_bytes(library.read_bytes())
    with pytest.raises(KernelsUnavailable):
        prebuilt.find(tmp_path)


def test_without_a_compiler_prebuilt_kernels_are_used(
    folder: Path, tmp_path: Path, capable: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(prebuilt.find, "__defaults__", (folder,))
    folder_of_builds = str(tmp_path / "kernels")
    assert kernels_for("torch", CPU, folder_of_builds) is None
    assert kernels_for("auto", torch.device("meta"), folder_of_builds) is None
    found = kernels_for("cpu", CPU, folder_of_builds)
    assert found is not None
    assert found.bfloat16


def test_prebuilt_kernels_have_the_features_of_this_cpu(folder: Path, capable: None) -> None:
    made = Kernels(prebuilt.find(folder))
    assert made.bfloat16
    assert made.tiles is ("amx_bf16" in HERE)
