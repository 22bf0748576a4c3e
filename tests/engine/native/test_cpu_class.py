"""Classes of CPUs: which one a CPU has, and builds that have no instructions of a faster one."""

import re
import shutil
import subprocess

import pytest

from engine.native import cpu_class
from engine.native.build import build
from engine.native.cpu_class import CLASSES, CpuClass, KernelsUnavailable, select
from services.engine.startup.native_kernels import load_kernels
from services.models.model_store import default_cache
from services.runtime.settings import InvalidSetting
from tests.engine.native_kernels import kernels

# Registers of instructions that CPUs of a class do not have.
REGISTERS = {"avx512-bf16": r"%tmm", "avx2": r"%tmm|%[xyz]mm(1[6-9]|2\d|3[01])|%zmm|%k[0-7]"}


def on_a_cpu_with(flags: frozenset[str], patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cpu_class, "instructions", lambda: flags | {"fpu", "aes"})


@pytest.mark.parametrize("number", range(len(CLASSES)), ids=[one.name for one in CLASSES])
def test_a_cpu_has_the_fastest_class_that_it_can_run_and_may_be_given_a_slower_one(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_cpu_with(CLASSES[number].needs, monkeypatch)
    assert select() == CLASSES[number]
    for slower in CLASSES[number:]:
        assert select(slower.name) == slower
    for faster in CLASSES[:number]:
        with pytest.raises(KernelsUnavailable, match=f"of class {CLASSES[number].name} and cannot run {faster.name}"):
            select(faster.name)


@pytest.mark.parametrize("missing", ["fma", "f16c", "avx2"])
def test_a_cpu_without_one_of_the_instructions_has_no_class(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_cpu_with(CLASSES[0].needs - {missing}, monkeypatch)
    with pytest.raises(KernelsUnavailable, match="has no AVX2, FMA and F16C"):
        select()


@pytest.mark.parametrize("missing", ["avx512_bf16", "avx512vl"])
def test_a_cpu_with_a_part_of_avx512_has_the_class_avx2(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_cpu_with(CLASSES[0].needs - {missing}, monkeypatch)
    assert select().name == "avx2"


@pytest.mark.skipif(not shutil.which("objdump"), reason="objdump is not installed")
@pytest.mark.parametrize("cpu", CLASSES[1:], ids=lambda cpu: cpu.name)
def test_a_build_has_no_instruction_of_a_faster_class(cpu: CpuClass) -> None:
    try:
        library = build(default_cache().parent / "kernels", cpu)
    except KernelsUnavailable as missing:
        pytest.skip(str(missing))
    objdump = shutil.which("objdump")
    assert objdump
    listing = subprocess.run(
        [objdump, "-d", "--no-show-raw-insn", str(library)], check=True, capture_output=True, text=True
    ).stdout
    assert "%ymm" in listing
    assert re.findall(REGISTERS[cpu.name], listing) == []


def test_the_environment_selects_a_slower_class(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels("avx2")  # or the test is skipped
    monkeypatch.setenv("QUIRE_CPU_CLASS", "avx2")
    assert load_kernels(str(default_cache().parent / "kernels")).cpu.name == "avx2"


@pytest.mark.parametrize("name", ["amx", "avx1024"])
def test_a_class_that_this_cpu_cannot_run_is_an_invalid_setting(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_cpu_with(CLASSES[-1].needs, monkeypatch)
    monkeypatch.setenv("QUIRE_CPU_CLASS", name)
    with pytest.raises(InvalidSetting, match=f"QUIRE_CPU_CLASS must be auto or one of avx2 on this CPU, not '{name}'"):
        load_kernels("")
