"""The real start from files on disk, as an engine's, and the first steps behind it; memory before and after each."""

import gc
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.gpu_check.budgets import Deadline
from bench.gpu_check.llama_engine import LLAMA_3_8B, TINY
from bench.gpu_check.notes import Notes
from bench.gpu_check.starting.checkpoint import load_without_accelerate, save_random_model
from bench.gpu_check.starting.stages import Assembly, Stages
from services.engine.settings import EngineSettings
from services.engine.startup.assembly import EngineParts, assemble

_ASSEMBLY = ("loading", "decoder", "measurement", "pool", "recording", "ready")


@dataclass(frozen=True)
class StartSizes:
    """A model, the bytes of its shards, the utilizations to start at, and the settings of the engine."""

    config: dict[str, Any]
    shard_bytes: int
    utilizations: tuple[float, ...]
    host_blocks: int
    token_budget: int = 0
    max_sequences: int = 0


FULL = StartSizes(LLAMA_3_8B | {"num_hidden_layers": 2}, 1 << 30, (0.90, 0.97), 4096)
SMALL = StartSizes(TINY, 100_000, (0.90, 0.97), 8, 24, 3)
_SIMULATED_BYTES = 2 << 30


def measure(sizes: StartSizes, device: torch.device, notes: Notes, deadline: Deadline) -> None:
    """Save the model, then start an engine at each utilization."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with notes.kept("start, files"):
            shards = save_random_model(folder, sizes.config, sizes.shard_bytes, device)
            notes.row("start_shards", shards, "files")
        load_without_accelerate()
        with _gpu(device) as gpu, torch.inference_mode(mode=False):
            for utilization in sizes.utilizations:
                if deadline.passed():
                    return
                _start(folder, utilization, sizes, gpu, notes)
                gc.collect()
                torch.cuda.empty_cache()


@contextmanager
def _gpu(device: torch.device) -> Iterator[torch.device]:
    """Yield the GPU; where there is none, a simulated one, which needs the tests."""
    if device.type == "cuda":
        yield device  # pragma: no cover - CUDA
    else:
        from tests.engine.simulated_gpu import GPU, simulated_gpu

        with simulated_gpu(_SIMULATED_BYTES):
            yield GPU


def _start(folder: Path, utilization: float, sizes: StartSizes, device: torch.device, notes: Notes) -> None:
    name = f"start_{round(100 * utilization):03d}"
    stages = Stages(name, notes, device)
    parts = _assemble(folder, utilization, sizes, device, stages)
    stages.run("pool_blocks", lambda: notes.row(f"{name}_pool_blocks", _blocks(parts), "blocks"), ("ready",))


def _assemble(
    folder: Path, utilization: float, sizes: StartSizes, device: torch.device, stages: Stages
) -> EngineParts | None:
    settings = EngineSettings(
        model=str(folder),
        device="cuda",
        gpu_memory_utilization=utilization,
        host_blocks=sizes.host_blocks,
        token_budget=sizes.token_budget,
        max_sequences=sizes.max_sequences,
    )
    assembly = Assembly(device)
    parts = assembly.run(lambda: assemble(settings))
    for stage in _ASSEMBLY:
        stages.take(stage, assembly)
    return parts


def _blocks(parts: EngineParts | None) -> int:
    assert parts is not None, "the engine did not start"
    return parts.scheduler.capacity.device_blocks
