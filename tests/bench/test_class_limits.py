"""Limits of libraries to the instructions of a class of CPUs."""

import subprocess
import sys

import pytest
import torch

from bench.report.targets import ROOT

HIGHEST = "import torch; print(torch.backends.cpu.get_cpu_capability())"


@pytest.mark.skipif(not torch.cpu._is_avx512_supported(), reason="the CPU has no AVX512")
@pytest.mark.parametrize(("cpu_class", "capability"), [("avx2", "AVX2"), ("avx512-bf16", "AVX512"), ("", "AVX512")])
def test_torch_in_a_benchmark_has_the_instructions_of_the_forced_class(cpu_class: str, capability: str) -> None:
    code = (
        f"import os; from bench.loads.class_limits import limits_of; os.environ |= limits_of({cpu_class!r}); {HIGHEST}"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [capability]
