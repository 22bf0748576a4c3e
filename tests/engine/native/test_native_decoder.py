"""Llama-shaped models run by the native kernels: as close to float32 as transformers' own bfloat16."""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.model.loading import load_model
from engine.native import prebuilt
from engine.native.build import build, sealed
from engine.native.cpu_backend import CpuBackend
from engine.native.cpu_class import CLASSES, NAMES, CpuClass, KernelsUnavailable
from engine.native.decoder import runs
from engine.native.kernels import Kernels
from engine.run.runner import ModelRunner
from services.engine.startup.native_kernels import decoder_for, kernels_for
from services.runtime.settings import InvalidSetting
from tests.engine import native_kernels
from tests.engine.decoding import logits, prompt
from tests.engine.families import FAMILIES, Checkpoint
from tests.reference import reference_model

# The package exports a function of the same name.
native_build = import_module("engine.native.build")
CPU = torch.device("cpu")
BLOCK = 16
KINDS = ("llama", "mistral", "qwen2", "qwen2 with windows", "qwen3", "qwen3 with windows")

Tiny = Callable[[str], Path]


@pytest.fixture(scope="module", params=NAMES)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return native_kernels.kernels(request.param)


def runner_of(kernels: Kernels, folder: Path, blocks: int = 32) -> ModelRunner:
    loaded = load_model(folder, torch.bfloat16, CPU)
    backend = CpuBackend(kernels, loaded.geometry, BLOCK, blocks, torch.bfloat16, threads=2)
    decoder = decoder_for(kernels, loaded, backend, 2)
    assert decoder is not None, "it matches the model's modules"
    return ModelRunner(loaded, backend, BLOCK, decoder=decoder)


def differences(folder: Path, tokens: tuple[int, ...], found: torch.Tensor) -> tuple[float, float]:
    """Return the distances from transformers' float32 logits: of these logits, and of transformers' bfloat16."""
    model = reference_model(folder)
    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True).eval()
    with torch.inference_mode():
        exact, close = (one(torch.tensor([tokens]), use_cache=False).logits[0, -1].float() for one in (model, rounded))
    ours, theirs = (float((one - exact).square().mean().sqrt() / exact.std()) for one in (found, close))
    return ours, theirs


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_as_close_to_float32_as_those_of_transformers(
    kernels: Kernels, checkpoint: Checkpoint, kind: str
) -> None:
    folder = checkpoint(FAMILIES[kind])
    runner = runner_of(kernels, folder)
    long, short, one = prompt(70, 1), prompt(21, 2), prompt(1, 3)
    tables = (7, 3, 9, 1, 12), (2, 8), (5,)
    logits(runner, (long[:40], 0, tables[0][:3]), (short[:20], 0, tables[1]))
    found = logits(runner, (long, 40, tables[0]), (short, 20, tables[1]), (one, 0, tables[2]))
    errors = [differences(folder, tokens, row) for tokens, row in zip((long, short, one), found, strict=True)]
    ours, theirs = (sum(column) for column in zip(*errors, strict=True))
    assert ours < 1.3 * theirs + 0.01


@pytest.mark.parametrize("count", [3, 40])
def test_a_sequence_gets_the_same_logits_alone_and_in_a_batch(kernels: Kernels, tiny_model: Tiny, count: int) -> None:
    runner = runner_of(kernels, tiny_model("llama"), 100)
    parts = [(prompt(30, seed), 0, (2 * seed + 1, 2 * seed + 2)) for seed in range(count)]
    together = logits(runner, *parts)
    for number in (0, count // 2, count - 1):
        assert torch.equal(logits(runner, parts[number])[0], together[number])


@pytest.mark.parametrize("kind", ["gpt2", "opt", "gemma2", "phi3", "mixtral", "gpt_neox", "gpt_bigcode"])
def test_a_model_that_is_not_llama_shaped_runs_its_modules(checkpoint: Checkpoint, kind: str) -> None:
    assert not runs(load_model(checkpoint(FAMILIES[kind]), torch.bfloat16, CPU).model)


def test_rotations_are_kept_for_the_positions_of_the_pool_alone(kernels: Kernels, tiny_model: Tiny) -> None:
    loaded = replace(load_model(tiny_model("llama"), torch.bfloat16, CPU), context_tokens=1 << 20)
    backend = CpuBackend(kernels, loaded.geometry, BLOCK, 8, torch.bfloat16, threads=1)
    decoder = decoder_for(kernels, loaded, backend, 1)
    assert decoder is not None, "it matches the model's modules"
    rows = [len(one) for one in decoder._kept if one.shape[1:] == (loaded.geometry.largest_head // 2,)]
    assert rows == [8 * BLOCK] * 2


def test_a_model_that_the_kernels_do_not_support_runs_its_modules(
    kernels: Kernels, tiny_model: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    loaded = load_model(tiny_model("llama"), torch.bfloat16, CPU)
    backend = CpuBackend(kernels, loaded.geometry, BLOCK, 8, torch.bfloat16, threads=1)
    loaded.model.config.rms_norm_eps = 40.0
    assert decoder_for(kernels, loaded, backend, 1) is None
    assert "is not used for this model" in caplog.text


def test_kernels_are_compiled_once_and_found_again(
    kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Path] = []

    def compile_for(cpu: CpuClass, library: Path) -> None:
        assert cpu == kernels.cpu
        library.write_bytes(sealed(b"code"))
        compiled.append(library)

    monkeypatch.setattr(native_build, "compile_for", compile_for)
    assert build(tmp_path / "new", kernels.cpu) == build(tmp_path / "new", kernels.cpu) == compiled[0]
    assert len(compiled) == 1


def test_an_engine_that_compiles_kernels_says_so_before(
    kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Compiling takes up to a minute, in which nothing else is logged."""
    caplog.set_level("INFO")
    expected = f"compiling the CPU kernels of class {kernels.cpu.name}, once"

    def compile_for(_cpu: CpuClass, library: Path) -> None:
        assert expected in caplog.text
        library.write_bytes(sealed(b"no library"))

    def no_build(_cpu: CpuClass) -> Path:
        raise KernelsUnavailable("no build was made in advance")

    monkeypatch.setattr(native_build, "compile_for", compile_for)
    monkeypatch.setattr(prebuilt, "find", no_build)
    monkeypatch.setenv("QUIRE_CPU_CLASS", kernels.cpu.name)
    for _ in range(2):
        assert kernels_for("auto", CPU, str(tmp_path)) is None  # what was written is no library
    assert caplog.text.count(expected) == 1


@pytest.mark.parametrize("damage", [b"", b"code", sealed(b"code")[:-1], sealed(b"code")[1:]])
def test_damaged_kernels_are_compiled_again(
    kernels: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: bytes
) -> None:
    """The system's loader ends the process if a library is truncated."""

    def compile_for(_cpu: CpuClass, library: Path) -> None:
        library.write_bytes(sealed(b"code"))

    monkeypatch.setattr(native_build, "compile_for", compile_for)
    library = build(tmp_path, kernels.cpu)
    library.write_bytes(damage)
    assert build(tmp_path, kernels.cpu).read_bytes() == sealed(b"code")


def test_without_a_compiler_torch_is_the_default_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert kernels_for("auto", CPU, str(tmp_path / "kernels")) is None
    assert "no C++ compiler" in caplog.text
    assert all(name in caplog.text for name in native_build._COMPILERS)
    with pytest.raises(InvalidSetting, match="attention_backend is 'cpu', but its kernels cannot be built"):
        kernels_for("cpu", CPU, str(tmp_path / "kernels"))
    assert kernels_for("torch", CPU, "") is None


def test_a_failing_compiler_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text('#!/bin/sh\ncase "$1" in --version) echo 1;; *) echo "error: no space" >&2; exit 1;; esac\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(KernelsUnavailable, match="error: no space"):
        build(tmp_path / "kernels", CLASSES[-1])
    assert list((tmp_path / "kernels").iterdir()) == []
