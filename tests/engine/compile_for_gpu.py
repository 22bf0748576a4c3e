"""Compiles every kernel of the Triton backend for an absent GPU, and prints the shared memory of each.

Run it as a module, without TRITON_INTERPRET; with `all`, for all shapes instead of the first. The backend runs
unchanged; launches only compile. The compiler needs no GPU to find errors and excessive shared memory.
"""

import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from bench.gpu_check.ceilings import reading
from blocks import Copy
from engine.attention.backend import PagedBatch, Scoring
from engine.attention.cache import CacheGeometry
from engine.gpu.triton_backend import TritonBackend
from engine.schedule.request import Sampling
from engine.schedule.step_plan import Work
from engine.triton_kernels.gated import silu_gated
from engine.triton_kernels.norm import add_and_norm
from engine.triton_kernels.paged_layer import PagedLayer
from engine.triton_kernels.rotary_write import HeadNorms, write_rotated

CPU = torch.device("cpu")
HOPPER = GPUTarget("cuda", 90, 32)
# Type, head size, KV heads, query heads of each, block size, scoring.
SHAPES = [
    (torch.bfloat16, 64, 3, 3, 32, Scoring(0.1, window=100, softcap=30.0)),
    (torch.bfloat16, 128, 8, 4, 16, Scoring(0.1)),
    (torch.float16, 80, 2, 1, 16, Scoring(0.1)),
    (torch.float16, 256, 1, 20, 24, Scoring(0.1, window=4096)),
    (torch.float32, 128, 8, 4, 16, Scoring(0.1)),
]


class Launches:
    """Compiles instead of launching, and prints the name and the bytes of shared memory."""

    def __init__(self) -> None:
        self.run = JITFunction.run

    def __call__(self, kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        assert all(0 <= size < 2**31 for size in grid)
        compiled = self.run(kernel, *arguments, grid=grid, warmup=True, **options)
        sys.stdout.write(f"{kernel.__name__} {compiled.metadata.shared}\n")


class Driver(SimpleNamespace):
    """The part of a driver that compilation needs."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def use(dtype: torch.dtype, size: int, kv_heads: int, group: int, block_size: int, scoring: Scoring) -> None:
    backend = TritonBackend(CacheGeometry(2, kv_heads, size), block_size, 8, dtype, CPU)
    work = [Work(1, (0,), 2 * block_size, (1, 2, 3), True, Sampling()), Work(2, (0,) * 9, 0, (4,), True, Sampling())]
    batch = PagedBatch.of(work, block_size, CPU)
    heads = kv_heads * group
    key, value = torch.randn(2, 10, kv_heads, size).to(dtype)
    backend.write(0, key, value, batch)
    backend.attend(0, torch.randn(10, heads, size).to(dtype), batch, scoring)
    backend.copy_blocks([Copy(1, 2)])
    projected = torch.randn(10, (heads + 2 * kv_heads) * size).to(dtype)
    rotations, query = torch.randn(99, size), torch.empty(10, heads, size, dtype=dtype)
    layer = PagedLayer(backend.cache, 0)
    write_rotated(projected, batch.slots, rotations, query, layer, batch.slots)
    norms = HeadNorms(key[0, 0], key[1, 0], 1e-5)
    write_rotated(projected, batch.slots, rotations, query, layer, batch.slots, norms)


def use_kernels_without_cache() -> None:
    hidden = torch.randn(10, 4096, dtype=torch.bfloat16)
    for computed in (None, hidden.clone()):
        add_and_norm(hidden, computed, hidden[0], 1e-5)
    silu_gated(hidden)
    reading(hidden)()


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    launches = Launches()
    processors = patch("torch.cuda.get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132))
    with processors, patch.object(JITFunction, "run", lambda *a, **k: launches(*a, **k)):
        for shape in SHAPES if "all" in sys.argv[1:] else SHAPES[:1]:
            use(*shape)
        use_kernels_without_cache()


if __name__ == "__main__":
    main()
