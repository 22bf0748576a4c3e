"""The kernels compile for a GPU without one: the compiler rejects code that the interpreter accepts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from services.models.model_store import default_cache
from tests.engine.gpu_resources import PROCESSORS, Resources
from tests.engine.key_loops import UNPIPELINED
from tests.engine.triton_case import make_triton_backend

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "engine" / "triton_kernels"
# A launch is written as `kernel[(grid)](arguments)`, or as `KernelLaunch(kernel, (grid), ...)` if it is repeated.
LAUNCH = re.compile(r"^ +(?:return )?(\w+)\[\(.*\)\]\(|\bKernelLaunch\(\s*(_\w+),", re.MULTILINE)


def launched(*files: Path) -> set[str]:
    return {name for file in files for found in LAUNCH.findall(file.read_text()) for name in found if name}


SAMPLER = launched(*FOLDER.glob("sampling/*.py"))
KERNELS = launched(*FOLDER.glob("*.py")) | {"_read"}  # the last is that of bench.gpu_check.ceilings


# Bytes of local memory of a thread, by capability, kernel and shared memory: registers that are spilled outside of the
# key loops, which is the rest that the assembler leaves. Both by Triton 3.7.1: decoding with 8 query heads of 64
# elements and sinks, and prefill of float32.
SPILLED = {
    (90, "_decode", 72704): 8,
    (90, "_prefill", 51456): 16,
}


def test_every_kernel_compiles_for_a_gpu_and_fits_into_its_processors() -> None:
    check_kernels("90")


def test_key_loops_that_await_each_tile_at_once_are_faults() -> None:
    lines = compiled("unpipelined", "90")
    assert [one for one in lines if one.startswith("fault 90 _prefill a key loop waits until [0] copies")]
    with pytest.raises(AssertionError, match="not pipelined"):
        checked(lines)


def test_key_loops_that_load_single_elements_are_faults() -> None:
    lines = [line for line in compiled("scalar", "90") if "scalar loads" in line]
    assert {line.split()[2] for line in lines} == set(UNPIPELINED)
    assert not [line for line in lines if " has 0 scalar loads" in line]


@pytest.mark.parametrize(
    ("capability", "shared", "registers", "threads", "programs"),
    [
        (90, 227 << 10, 32, 128, 1),
        (90, (227 << 10) + 1, 32, 128, 0),
        (80, 163 << 10, 32, 128, 1),
        (80, (163 << 10) + 1, 32, 128, 0),
        (90, 72704, 168, 128, 3),
        (80, 72704, 168, 128, 2),
        (90, 0, 255, 256, 1),
        (90, 0, 255, 512, 0),
        (100, 0, 32, 1024, 2),
    ],
)
def test_programs_of_a_processor_are_limited_by_memory_registers_and_threads(
    capability: int, shared: int, registers: int, threads: int, programs: int
) -> None:
    assert Resources(capability, "kernel", shared, registers, 0, threads).programs == programs


def check_kernels(*which: str, packages: Path | None = None) -> list[Resources]:
    """Compile the kernels, and check that each can be launched; `packages` come before those that are installed."""
    found = checked(compiled(*which, packages=packages))
    assert {one.kernel for one in found} == KERNELS | (SAMPLER if "sampler" in which else set())
    assert {one.capability for one in found} == {int(one) for one in which if one.isdigit()} <= PROCESSORS.keys()
    return found


def checked(lines: list[str]) -> list[Resources]:
    """Return what the kernels occupy, after a check that they can be launched and have no slow key loop."""
    assert [line for line in lines if line.startswith("fault")] == []
    found = [_resources(line) for line in lines]
    assert [one for one in found if not one.programs] == []
    attention = [one for one in found if one.kernel in UNPIPELINED]
    assert [one for one in attention if one.stack > SPILLED.get((one.capability, one.kernel, one.shared), 0)] == []
    return found


def compiled(*which: str, packages: Path | None = None) -> list[str]:
    """Compile the kernels, and return the lines that describe them."""
    make_triton_backend()
    cache = default_cache().parent / "triton"  # Triton compiles a kernel again when its source changes
    paths = [str(path) for path in (packages, ROOT) if path]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    command = [sys.executable, "-m", "tests.engine.compile_for_gpu", *which]
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if "ptxas" in ended.stderr and "not found" in ended.stderr:
        pytest.skip("this Triton has no assembler for GPUs")
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def _resources(line: str) -> Resources:
    capability, kernel, *numbers = line.split()
    return Resources(int(capability), kernel, *map(int, numbers))
