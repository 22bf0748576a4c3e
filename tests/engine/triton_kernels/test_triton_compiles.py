"""The kernels compile for a GPU without one: the compiler rejects code that the interpreter accepts."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from services.models.model_store import default_cache
from tests.engine.triton_case import make_triton_backend

ROOT = Path(__file__).parents[3]
SHARED_BYTES = 227 * 1024  # limit of a program on an H100 or H200
KERNELS = {"_write", "_list_work", "_decode", "_combine", "_prefill", "_copy", "_write_rotated"}
KERNELS |= {"_add_and_norm", "_silu_gated", "_read"}


def test_every_kernel_compiles_for_a_gpu_and_fits_into_its_shared_memory() -> None:
    check_kernels()


def check_kernels(*which: str) -> None:
    make_triton_backend()
    cache = default_cache().parent / "triton"  # Triton compiles a kernel again when its source changes
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, "-m", "tests.engine.compile_for_gpu", *which]
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if "ptxas" in ended.stderr and "not found" in ended.stderr:
        pytest.skip("this Triton has no assembler for GPUs")
    assert ended.returncode == 0, ended.stderr
    compiled = [line.split() for line in ended.stdout.splitlines()]
    assert Counter(name for name, _ in compiled).keys() == KERNELS
    assert max(int(shared) for _, shared in compiled) <= SHARED_BYTES
