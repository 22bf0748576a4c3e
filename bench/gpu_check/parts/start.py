"""The real start of an engine from files on disk, and its first steps, with the memory before and after each stage."""

import gc
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from bench.gpu_check.budgets import Deadline
from bench.gpu_check.llama_engine import LLAMA_3_8B, TINY
from bench.gpu_check.notes import Notes
from bench.gpu_check.starting.checkpoint import load_without_accelerate, save_random_model
from bench.gpu_check.starting.stages import Assembly, Stages
from bench.gpu_check.starting.steps import FirstSteps, replayed
from engine.schedule.limits import Limits
from services.engine.settings import EngineSettings
from services.engine.startup.assembly import EngineParts, assemble

Value = TypeVar("Value")

_ASSEMBLY = ("loading", "decoder", "measurement", "pool", "recording", "ready")
_SIMULATED_BYTES = 2 << 30
# Of an engine that has ended: workspaces of libraries.
_MOST_LEFT = 256 << 20


@dataclass(frozen=True)
class StartSizes:
    """A model, the bytes of its shards, the utilizations to start at, the settings of the engine, and its requests.

    Settings of 0 are the defaults. `prompts` are lengths: without the last token, each is at most the token budget.
    """

    config: dict[str, Any]
    shard_bytes: int
    utilizations: tuple[float, ...]
    host_blocks: int
    token_budget: int
    max_sequences: int
    prompts: tuple[int, ...]
    generated: int


# Blocks of 128 KiB: a host tier of 1 GiB. Of the prompts, one is launched, and one is recorded by pieces.
FULL = StartSizes(LLAMA_3_8B | {"num_hidden_layers": 2}, 1 << 30, (0.90, 0.97), 8192, 0, 0, (1500, 200), 32)
# Checks at the start run as many tokens as the context has, up to 24. Larger weights let tokens depend on the context.
_SHORT = TINY | {"max_position_embeddings": 8, "initializer_range": 0.2}
SMALL = StartSizes(_SHORT, 100_000, (0.97,), 8, 6, 2, (5, 2), 2)


class _Gpu(NamedTuple):
    """A device, and what a thread enters to use it."""

    device: torch.device
    entered: AbstractContextManager[object]


def measure(sizes: StartSizes, device: torch.device, notes: Notes, deadline: Deadline) -> None:
    """Save the model, then start an engine at each utilization."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with notes.kept("start, files"):
            notes.row("start_shards", save_random_model(folder, sizes.config, sizes.shard_bytes, device), "files")
        load_without_accelerate()
        with _gpu(device) as gpu:
            for utilization in sizes.utilizations:
                if deadline.passed():
                    return
                _start(folder, utilization, sizes, gpu, notes)


@contextmanager
def _gpu(device: torch.device) -> Iterator[_Gpu]:
    """Yield the GPU; where there is none, a simulated one."""
    if device.type == "cuda":
        yield _Gpu(device, nullcontext())  # pragma: no cover - CUDA
    else:
        from tests.engine.simulated_gpu import GPU, simulated_gpu

        with simulated_gpu(_SIMULATED_BYTES) as entered:
            yield _Gpu(GPU, entered)


def _start(folder: Path, utilization: float, sizes: StartSizes, gpu: _Gpu, notes: Notes) -> None:
    """Start an engine, run its first steps, and let it go."""
    stages = Stages(f"start_{round(100 * utilization):03d}", notes, gpu.device)
    settings = EngineSettings(
        model=str(folder),
        device="cuda",
        gpu_memory_utilization=utilization,
        host_blocks=sizes.host_blocks,
        token_budget=sizes.token_budget,
        max_sequences=sizes.max_sequences,
    )
    before = torch.cuda.memory_allocated(gpu.device)
    parts = _assembled(settings, gpu, stages)
    if parts is not None:
        stages.row("pool_blocks", parts.scheduler.capacity.device_blocks, "blocks")
    with gpu.entered:
        _use(parts, settings.limits(on_gpu=True), sizes, stages)
    del parts
    stages.run("release", lambda: _release(before, gpu.device))


def _assembled(settings: EngineSettings, gpu: _Gpu, stages: Stages) -> EngineParts | None:
    """Assemble on a thread of its own, as the engine does."""
    assembly = Assembly(gpu.device)

    def run() -> EngineParts | None:
        with gpu.entered:
            return assembly.run(lambda: assemble(settings))

    with ThreadPoolExecutor(1) as thread:
        parts = thread.submit(run).result()
    stages.take(assembly, _ASSEMBLY)
    return parts


def _use(parts: EngineParts | None, limits: Limits, sizes: StartSizes, stages: Stages) -> None:
    """Run steps of each kind; those that read what an earlier one has computed do not run without it."""
    steps = FirstSteps(parts, limits, sizes.prompts) if parts else None

    def replay() -> None:
        stages.row("replayed_tokens_equal", replayed(_present(parts), min(sizes.prompts), sizes.generated), "tokens")

    stages.run("prefill", lambda: _present(steps).prefill(), ("ready",))
    stages.run("decode", lambda: _present(steps).decode(), ("prefill",))
    stages.run("mixed", lambda: _present(steps).mixed(), ("decode",))
    stages.run("swap_out", lambda: _present(steps).swap_out(), ("decode",))
    stages.run("swap_in", lambda: _present(steps).swap_in(), ("swap_out",))
    stages.run("replay", replay, ("ready",))
    stages.run("largest_step", lambda: _present(steps).largest(), ("ready",))


def _present(value: Value | None) -> Value:
    assert value is not None, "the start has failed"
    return value


def _release(before: int, device: torch.device) -> None:
    """Give all memory back. Fails if the engine's tensors are still there."""
    gc.collect()
    torch.cuda.empty_cache()
    left = torch.cuda.memory_allocated(device) - before
    assert left < _MOST_LEFT, f"{left / (1 << 20):.0f} MiB of the engine's tensors are left"
