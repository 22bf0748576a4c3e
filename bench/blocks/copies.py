"""Block copies on the CPU, between the tiers and in the cache, beside one large copy of the same size.

Each repetition draws 256 random blocks of the demo model's shape in bfloat16. All kinds of copies take turns, and each
runs twice in a repetition.
"""

import os

# As in the engine's process, and before torch is imported: sleeping threads would have to be woken for each block.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import random
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

from bench.report.results import Row, in_turn, publish, repeated, row
from bench.report.terms import Terms
from bench.report.verdict import null_interval
from blocks import Copy
from engine.attention import TorchBackend
from engine.attention.backend import Direction
from engine.attention.cache import CacheGeometry
from engine.native.cpu_backend import CpuBackend
from services.engine.startup.native_kernels import load_kernels
from services.models.model_store import default_cache

REPETITIONS = 15
GEOMETRY = CacheGeometry.uniform(layers=30, kv_heads=3, head_size=64)
BLOCK_SIZE, BLOCKS, COPIED = 16, 1024, 256
DTYPE = torch.bfloat16
COPIED_BYTES = COPIED * GEOMETRY.block_bytes(BLOCK_SIZE, DTYPE)
LARGE = "one_large_copy"
AGAIN = "_again"
CODE = ("blocks", "engine/attention", "engine/native", "bench/blocks/copies.py")

Backend = CpuBackend | TorchBackend


def main() -> None:
    """Measure everything, and publish it."""
    kernels = load_kernels(str(default_cache().parent / "kernels"))
    backends: dict[str, Backend] = {
        "": CpuBackend(kernels, GEOMETRY, BLOCK_SIZE, BLOCKS, DTYPE, BLOCKS),
        "torch_": TorchBackend(GEOMETRY, BLOCK_SIZE, BLOCKS, DTYPE, host_blocks=BLOCKS),
    }
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    draw = random.Random(1)
    seconds: dict[str, list[float]] = {}
    for backend in backends.values():
        backend.cache.normal_()
    for number in repeated(REPETITIONS, "copies"):
        ways: dict[str, Callable[[], object]] = {LARGE: lambda: target.copy_(source)}
        for prefix, backend in backends.items():
            ways |= _ways(prefix, backend, draw)
        ways |= {f"{name}{AGAIN}": copy for name, copy in ways.items()}
        for name in in_turn(list(ways), number):
            begun = perf_counter()
            ways[name]()
            if number:
                seconds.setdefault(name, []).append(perf_counter() - begun)
    terms = Terms(kv_cache="bfloat16", threads=torch.get_num_threads(), work=f"{COPIED} blocks, {COPIED_BYTES:,} bytes")
    publish("copies", rows_of(seconds, terms, terms), REPETITIONS, code=CODE, seconds=seconds, bytes=COPIED_BYTES)


def _ways(prefix: str, backend: Backend, draw: random.Random) -> dict[str, Callable[[], object]]:
    """Return the measured copies of a backend; no source is a destination."""
    ids = draw.sample(range(1, BLOCKS + 1), 2 * COPIED)
    copies = [Copy(*pair) for pair in zip(ids[:COPIED], ids[COPIED:], strict=True)]
    return {
        f"{prefix}swap_out": lambda: backend.swap(copies, Direction.DEVICE_TO_HOST),
        f"{prefix}swap_in": lambda: backend.swap(copies, Direction.HOST_TO_DEVICE),
        f"{prefix}copy": lambda: backend.copy_blocks(copies),
    }


def rows_of(seconds: dict[str, list[float]], ours: Terms, large: Terms) -> list[Row]:
    """Return the rate of each way, and its ratio over one large copy."""
    rows = []
    names = [name for name in seconds if not name.endswith(AGAIN)]
    for name in names:
        rate = COPIED_BYTES / median(seconds[name]) / 1e9
        side = {name: large if name == LARGE else ours}
        rows.append(row("copies", f"{name}_gigabytes_per_second", round(rate, 2), "GB/s", terms=side))
    for name in names:
        if name != LARGE:
            own = seconds[name]
            value = round(median(one / way for one, way in zip(seconds[LARGE], own, strict=True)), 3)
            sides, null = {name: ours, LARGE: large}, null_interval(own, seconds[name + AGAIN])
            metric = f"{name}_over_{LARGE}"
            rows.append(row("copies", metric, value, "ratio", "one large copy", terms=sides, null=null))
    return rows


if __name__ == "__main__":
    main()
