"""Compiles every kernel for absent GPUs, and prints what a program of each occupies.

Run it as a module, without TRITON_INTERPRET: `[all] [sampler] [unpipelined] [scalar] [CAPABILITY...]`. With `all`,
for all shapes instead of the first; with `sampler`, its kernels too; with `unpipelined`, prefill has tiles whose loads
are awaited at once; with `scalar`, K and V are not loaded in vectors; without capabilities, for 90. A line that begins
with `fault` names a key loop that is slow. The backend and the sampler run unchanged; launches only compile. The
compiler needs no GPU to find errors, excessive shared memory and spilled registers.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Protocol
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from bench.gpu_check.ceilings import reading
from blocks import Copy
from engine.attention.backend import Direction, PagedBatch, Scoring
from engine.attention.cache import CacheGeometry, LayerShape
from engine.gpu.triton_backend import TritonBackend
from engine.run.device_sampler import DeviceSampler
from engine.run.sampling import Draw
from engine.schedule.request import LogitRules, Sampling
from engine.schedule.step_plan import RowRules, Work
from engine.triton_kernels import tuning
from engine.triton_kernels.embedding import embed_part
from engine.triton_kernels.gated import silu_gated
from engine.triton_kernels.norm import add_and_norm
from engine.triton_kernels.rotary_write import HeadNorms, write_rotated
from tests.engine.gpu_resources import Resources
from tests.engine.key_loops import UNPIPELINED, faults_of, spilling_loops

CPU = torch.device("cpu")
# Type, shape of a layer, query heads of a KV head, block size, scoring, whether it has sinks. Together they have all
# tuned tiles.
SHAPES = [
    (torch.bfloat16, LayerShape(3, 64, 64), 3, 32, Scoring(0.1, window=100, softcap=30.0), False),
    (torch.bfloat16, LayerShape(8, 128, 128), 4, 16, Scoring(0.1), False),
    (torch.float16, LayerShape(2, 80, 80), 1, 16, Scoring(0.1), False),
    (torch.float16, LayerShape(1, 256, 256), 20, 24, Scoring(0.1, window=4096), False),
    (torch.float32, LayerShape(8, 128, 128), 4, 16, Scoring(0.1), False),
    (torch.float32, LayerShape(3, 64, 64), 3, 32, Scoring(0.1), False),
    # Of GPT-OSS, DeepSeek-V3 without absorption, and the full layers of Gemma-4.
    (torch.bfloat16, LayerShape(8, 64, 64), 8, 16, Scoring(0.1, window=128), True),
    (torch.bfloat16, LayerShape(128, 192, 128), 1, 16, Scoring(0.1), False),
    (torch.bfloat16, LayerShape(4, 512, 512), 8, 16, Scoring(0.1), False),
]
VOCABULARY = 128256


class Launches:
    """Compiles instead of launching, and reports the resources with what was compiled and its constants."""

    def __init__(self, driver: "Driver", report: "Report") -> None:
        self.run = JITFunction.run
        self.driver = driver
        self.report = report

    def __call__(self, kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        assert all(0 <= size < 2**31 for size in grid)
        compiled = self.run(kernel, *arguments, grid=grid, warmup=True, **options)
        resources = Resources.of(self.driver.capability, kernel.__name__, compiled, cuobjdump())
        self.report(resources, compiled, options)


class Report(Protocol):
    """Takes what a launch would have run."""

    def __call__(self, resources: Resources, compiled: Any, options: dict[str, Any], /) -> None:
        """Take one launch."""


def cuobjdump() -> str:
    """Return the path of Triton's reader of machine code."""
    return str(triton.knobs.nvidia.cuobjdump.path)


def print_faults(resources: Resources, compiled: Any, _options: dict[str, Any]) -> None:
    """Print the resources, and the faults of key loops."""
    sys.stdout.write(" ".join(map(str, resources)) + "\n")
    if resources.kernel in UNPIPELINED:
        faults = faults_of(resources.kernel, compiled)
        if resources.stack and spilling_loops(compiled, cuobjdump()):
            faults.append("a key loop spills registers")
        for fault in faults:
            sys.stdout.write(f"fault {resources.capability} {resources.kernel} {fault}\n")


class Driver(SimpleNamespace):
    """The part of a driver that compilation needs, with a device for each compute capability."""

    capability = 90

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def properties(self, _device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(multi_processor_count=132, major=self.capability // 10)

    def get_current_stream(self, _device: int) -> int:
        return 0


def use(dtype: torch.dtype, shape: LayerShape, group: int, block_size: int, scoring: Scoring, has_sinks: bool) -> None:
    kv_heads, size, value_size = shape[:3]
    backend = TritonBackend(CacheGeometry((shape, shape)), block_size, 8, dtype, CPU, host_blocks=2)
    work = [Work(1, (0,), 2 * block_size, (1, 2, 3), True, Sampling()), Work(2, (0,) * 9, 0, (4,), True, Sampling())]
    batch = PagedBatch.of(work, block_size, CPU)
    heads = kv_heads * group
    if has_sinks:
        scoring = scoring._replace(sinks=torch.randn(heads).to(dtype))
    key, value = (torch.randn(10, kv_heads, one).to(dtype) for one in (size, value_size))
    backend.write(0, key, value, batch)
    backend.attend(0, torch.randn(10, heads, size).to(dtype), batch, scoring)
    # The keys of few tokens behind a long prefix are split.
    table = (1,) * (1024 // block_size + 1)
    behind = PagedBatch.of([Work(3, (0,) * 2, 1022, table, True, Sampling())], block_size, CPU)
    backend.attend(0, torch.randn(2, heads, size).to(dtype), behind, scoring)
    backend.copy_blocks([Copy(1, 2)])
    backend.swap([Copy(1, 2)], Direction.DEVICE_TO_HOST)
    if value_size == size:
        use_rotation(backend, key, batch, heads)


def use_rotation(backend: TritonBackend, key: torch.Tensor, batch: PagedBatch, heads: int) -> None:
    kv_heads, size = key.shape[1:]
    projected = torch.randn(10, (heads + 2 * kv_heads) * size).to(key.dtype)
    rotations, query = torch.randn(99, size), torch.empty(10, heads, size, dtype=key.dtype)
    layer = backend.paged_layer(0)
    write_rotated(projected, batch.slots, rotations, query, layer, batch.slots)
    norms = HeadNorms(key[0, 0], key[1, 0], 1e-5)
    write_rotated(projected, batch.slots, rotations, query, layer, batch.slots, norms)


def use_kernels_without_cache() -> None:
    hidden = torch.randn(10, 4096, dtype=torch.bfloat16)
    for computed in (None, hidden.clone(), torch.stack((hidden, hidden))):
        add_and_norm(hidden, computed, hidden[0], 1e-5)
    silu_gated(hidden)
    embed_part(hidden, 5, torch.zeros(10, dtype=torch.int64), hidden)
    reading(hidden)()


def use_sampler(dtype: torch.dtype) -> None:
    penalties = RowRules(LogitRules(1.1, 0.2, 0.3), (1, 2), (3,))
    for sampling in (Sampling(), Sampling(top_p=0.9, top_k=50, min_p=0.1, top_n_sigma=1.0)):
        draws = [Draw(sampling, 0, 3, penalties, 7), Draw(Sampling(temperature=0.0), 0, 3)]
        DeviceSampler(2, VOCABULARY, CPU).sample(torch.randn(2, VOCABULARY).to(dtype), draws)


@contextmanager
def compiling(report: Report) -> Iterator[Driver]:
    """Compile what is launched for the capability of the driver, and report it."""
    driver = Driver()
    triton.runtime.driver.set_active(driver)
    launches = Launches(driver, report)
    processors = patch("torch.cuda.get_device_properties", driver.properties)
    with processors, patch.object(JITFunction, "run", lambda *a, **k: launches(*a, **k)):
        yield driver


def main() -> None:
    every = "all" in sys.argv[1:]
    if "scalar" in sys.argv[1:]:
        SHAPES[0] = (torch.bfloat16, LayerShape(2, 17, 17), 2, 16, Scoring(0.1), False)
    if "unpipelined" in sys.argv[1:]:
        tuning.TILES[64] = (tuning.TILES[64][0], tuning.Tiling(128, 64, 8, 3))
    with compiling(print_faults) as driver:
        for capability in [int(one) for one in sys.argv[1:] if one.isdigit()] or [90]:
            driver.capability = capability
            for shape in SHAPES if every else SHAPES[:1]:
                use(*shape)
            use_kernels_without_cache()
            for dtype in (torch.bfloat16, torch.float32) if "sampler" in sys.argv[1:] else ():
                use_sampler(dtype)


if __name__ == "__main__":
    main()
