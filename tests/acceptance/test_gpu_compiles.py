"""The kernels compile for a GPU, for every kind of shape, and by an older Triton; `make test` compiles one kind."""

import subprocess
import sys
from pathlib import Path

from tests.acceptance.conftest import Record
from tests.engine.gpu_resources import PROCESSORS
from tests.engine.triton_kernels.test_triton_compiles import check_kernels

CAPABILITIES = [str(one) for one in PROCESSORS]
# torch 2.11, which GPU machines often have, requires it.
OLDER = "triton==3.6.0"


def test_every_kernel_compiles_for_every_kind_of_shape_and_gpu(record: Record) -> None:
    found = check_kernels("all", "sampler", *CAPABILITIES)
    record(most_shared=max(one.shared for one in found), most_stack=max(one.stack for one in found))


def test_every_kernel_compiles_by_an_older_triton(record: Record, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path), OLDER]
    subprocess.run(command, check=True)
    found = check_kernels("all", "sampler", *CAPABILITIES, packages=tmp_path)
    record(most_shared=max(one.shared for one in found), most_stack=max(one.stack for one in found))
