"""The model's folder and the kernels of an engine that this command starts."""

import logging
import threading
import time
from pathlib import Path

import pytest

from engine.native import build
from engine.native.cpu_class import CpuClass, KernelsUnavailable, supported
from services.cli import local_model
from services.engine.settings import EngineSettings
from tests.sound_folder import write_sound_folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_sound_folder(tmp_path / "model")


@pytest.mark.skipif(not supported(), reason="this CPU has no kernels")
def test_the_first_kernels_are_compiled_while_the_model_is_fetched(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling, fetched = threading.Event(), threading.Event()
    compiled: list[Path] = []

    def compile_kernels(folder: Path, cpu: CpuClass) -> Path:
        compiling.set()
        assert fetched.wait(60)
        compiled.append(folder)
        return folder

    def fetch(name: str, *, logged: bool) -> Path:
        assert compiling.wait(60)
        fetched.set()
        return model

    monkeypatch.setattr(build, "build", compile_kernels)
    monkeypatch.setattr(local_model, "fetch", fetch)
    kernels = model / "kernels"
    settings = local_model.engine_with_folder(EngineSettings(model="demo", kernels_folder=str(kernels)))
    assert compiled == [kernels]
    assert (settings.model, settings.model_name) == (str(model), "demo")


@pytest.mark.parametrize(
    "chosen", [{"device": "cuda"}, {"attention_backend": "torch"}, {"attention_backend": "triton"}, {}]
)
def test_nothing_is_compiled_for_other_devices_and_after_the_first_time(
    model: Path, monkeypatch: pytest.MonkeyPatch, chosen: dict[str, str]
) -> None:
    compiled: list[Path] = []
    monkeypatch.setattr(build, "build", lambda folder, cpu: compiled.append(folder))
    kernels = model / "kernels"
    if not chosen:
        kernels.mkdir()
    local_model.engine_with_folder(EngineSettings(model=str(model), kernels_folder=str(kernels), **chosen))
    assert not compiled


def test_kernels_that_cannot_be_compiled_are_left_to_the_engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path, cpu: CpuClass) -> Path:
        raise KernelsUnavailable("no C++ compiler was found")

    monkeypatch.setattr(build, "build", fail)
    settings = EngineSettings(model=str(model), kernels_folder=str(model / "kernels"))
    assert local_model.engine_with_folder(settings).model == str(model)


@pytest.mark.skipif(not supported(), reason="this CPU has no kernels")
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_compilation_that_outlasts_the_model_is_shown(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    log_format: str,
) -> None:
    fetched = threading.Event()

    def compile_kernels(folder: Path, cpu: CpuClass) -> Path:
        assert fetched.wait(60)
        time.sleep(0.5)
        return folder

    def fetch(name: str, *, logged: bool) -> Path:
        fetched.set()
        return model

    monkeypatch.setattr(build, "build", compile_kernels)
    monkeypatch.setattr(local_model, "fetch", fetch)
    caplog.set_level(logging.INFO)
    local_model.engine_with_folder(EngineSettings(kernels_folder=str(model / "kernels"), log_format=log_format))
    shown = capsys.readouterr().err if log_format == "text" else caplog.text
    assert shown.count("compiling the CPU kernels, once") == 1
