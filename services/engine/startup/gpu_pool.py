"""Sizes the pool of a GPU by the memory that weights and the largest step leave, before steps are recorded."""

from collections.abc import Callable
from typing import Protocol

import torch

from blocks import blocks_for
from engine.model.loaded import LoadedModel
from engine.model.sizing import DoesNotFit, RecordedSizes, blocks_on_gpu, cache_bytes
from engine.schedule.capacity import Capacity
from engine.schedule.limits import Limits
from engine.schedule.request import LogitRules, Sampling
from engine.schedule.step_plan import RowRules, Runner, StepPlan, Work
from kvmanager.pool_spec import MAX_TIER_BLOCKS
from services.engine.settings import EngineSettings
from services.runtime.settings import InvalidSetting

_EVERY_FILTER = Sampling(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01)
_PENALTIES = LogitRules(repetition_penalty=1.1, frequency_penalty=0.1)


class DeviceMemory(Protocol):
    """The memory of a device."""

    def free_and_total(self) -> tuple[int, int]:
        """Return free and total bytes; memory that torch keeps for later tensors is not free."""

    def empty_cache(self) -> None:
        """Give the device the memory back that torch keeps for later tensors."""

    def synchronize(self) -> None:
        """Wait for all queued work."""


class CudaMemory:
    """The memory of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def free_and_total(self) -> tuple[int, int]:
        """See DeviceMemory. Other processes of the GPU count too."""
        return torch.cuda.mem_get_info(self._device)

    def empty_cache(self) -> None:
        """See DeviceMemory."""
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """See DeviceMemory."""
        torch.cuda.synchronize(self._device)


class PoolMeasurement:
    """Measures what a model takes, from its creation on: make it before the model is loaded."""

    def __init__(self, memory: DeviceMemory) -> None:
        """Read the free memory. The GPU's context and other processes are no part of the model."""
        self._memory = memory
        self._free_before, _ = memory.free_and_total()

    def blocks(
        self, run_step: Callable[[StepPlan], object], settings: EngineSettings, loaded: LoadedModel, capacity: Capacity
    ) -> int:
        """Return the blocks of the pool beside a model with a cache of `capacity`, which the pool replaces.

        `run_step` runs a step to its end, and raises its failure. The step's memory is kept by torch for later ones.
        Raises InvalidSetting if no block fits.
        """
        memory, limits = self._memory, settings.limits(on_gpu=True)
        memory.empty_cache()
        try:
            run_step(largest_step(capacity, limits))
            memory.synchronize()
            free, total = memory.free_and_total()
            block_bytes = loaded.geometry.block_bytes(capacity.block_size, loaded.cache_dtype)
            trial = cache_bytes(capacity.device_blocks, block_bytes)
            used = self._free_before - free - trial
            free += trial - recorded_sizes(limits.max_sequences, settings.tensor_parallel, loaded, capacity).reserved
            blocks = blocks_on_gpu(total, settings.gpu_memory_utilization, used, free, block_bytes)
            return min(blocks, MAX_TIER_BLOCKS)
        except (DoesNotFit, torch.OutOfMemoryError) as error:
            reason = str(error) if isinstance(error, DoesNotFit) else "a step does not fit beside the weights"
            raise InvalidSetting(
                f"gpu_memory_utilization is {settings.gpu_memory_utilization}, and the GPU is too small: {reason}; a "
                f"step has token_budget {limits.token_budget} and max_sequences {limits.max_sequences}"
            ) from error


def run_sampled(runner: Runner, plan: StepPlan) -> None:
    """Run a step to its end. Raises the first failure of its sampling, which its results would give to a request."""
    faults = [one.fault for one in runner.launch(plan).result() if one.fault is not None]
    if faults:
        raise faults[0]


def recorded_sizes(sequences: int, ranks: int, loaded: LoadedModel, capacity: Capacity) -> RecordedSizes:
    """Return what the memory of recorded steps of up to `sequences` sequences depends on."""
    blocks = blocks_for(capacity.context_tokens, capacity.block_size)
    return RecordedSizes(sequences, blocks, loaded.vocabulary_size, loaded.dtype.itemsize, ranks)


def is_measured(settings: EngineSettings) -> bool:
    """Return whether the pool of settings for a device (`EngineSettings.for_device`) has no size yet."""
    return not settings.device_blocks and not settings.cache_mib


def largest_step(capacity: Capacity, limits: Limits) -> StepPlan:
    """Return a step of the whole budget and of all sequences, each sampled with every filter.

    Most of them decode, the others have prompts. All share one block, because the results are not used; their ids are
    those of no request.
    """
    work, more = [], limits.token_budget - limits.max_sequences
    for number in range(limits.max_sequences):
        tokens = (0,) * (1 + min(more, capacity.context_tokens - 1))
        more -= len(tokens) - 1
        table = (1,) * blocks_for(len(tokens), capacity.block_size)
        rules = RowRules(_PENALTIES, prompt=tokens)
        work.append(Work(-1 - number, tokens, 0, table, True, _EVERY_FILTER, rules=rules))
    return StepPlan(0, (), tuple(reversed(work)))
