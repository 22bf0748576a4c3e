"""Memory of a model by purpose, and the number of blocks that remain: the result of `quire plan`."""

import math
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from blocks import WindowKind, blocks_for
from engine.kept.kept_memory import kept_bytes_for
from engine.kinds.layer_kinds import layer_kinds, one_kind
from engine.kinds.split import SplitSizes, host_blocks_of, split_blocks, split_memory
from engine.model.model_shape import ModelShape
from engine.model.sizing import DoesNotFit, PoolSize, blocks_on_gpu, blocks_within, cache_bytes

# An engine's process on a CPU: Python, torch, transformers and the libraries of its service.
CPU_PROCESS_BYTES = 768 << 20
# Requests of a gateway for each sequence of the engine: enough waiting to keep the batch full.
_REQUESTS_PER_SEQUENCE = 1.25


@dataclass(frozen=True)
class Workload:
    """Limits of the engine that cost memory, and request lengths in tokens.

    `context_tokens` is the longest request; `lengths` are prompt and answer of a typical one. Without `max_sequences`
    it is as many as fit, at most `token_budget`.
    """

    block_size: int
    token_budget: int
    context_tokens: int
    max_sequences: int | None = None
    lengths: tuple[int, int] | None = None

    @property
    def typical_tokens(self) -> int:
        """Tokens of a typical request: prompt and answer. Default: a request that fills the context."""
        return sum(self.lengths) if self.lengths else self.context_tokens


@dataclass(frozen=True)
class MemoryPlan:
    """Memory in bytes by purpose, and the size of the pool. `memory_bytes` is the memory that the device must have.

    Tokens and blocks are those of kind 0; `windows` are the other kinds of blocks.
    """

    memory_bytes: int
    memory_utilization: float
    weights_bytes: int
    process_bytes: int
    step_bytes: int
    token_bytes: int
    block_bytes: int
    block_size: int
    device_blocks: int
    context_tokens: int
    typical_tokens: int
    max_sequences: int
    token_budget: int
    host_blocks: int
    windows: tuple[WindowKind, ...] = ()

    @property
    def pool(self) -> PoolSize:
        """The pool of the device."""
        return PoolSize(self.block_size, self.device_blocks)

    @property
    def max_requests(self) -> int:
        """Recommended max_requests of a gateway with this engine only."""
        return max(1, math.ceil(_REQUESTS_PER_SEQUENCE * self.max_sequences))

    def kept_bytes(self, ranks: int) -> int:
        """Return the memory of blocks that outlive their engine, in place of the cache: 0 on a GPU and with ranks."""
        if ranks > 1 or not self.process_bytes:
            return 0
        windows = [(kind.device_blocks, kind.host_blocks, kind.block_bytes) for kind in self.windows]
        return kept_bytes_for((self.device_blocks, self.host_blocks, self.block_bytes), *windows)

    @property
    def cache_bytes(self) -> int:
        """Memory of the blocks of all kinds."""
        windows = [cache_bytes(kind.device_blocks, kind.block_bytes) for kind in self.windows]
        return cache_bytes(self.device_blocks, self.block_bytes) + sum(windows)

    @property
    def host_cache_bytes(self) -> int:
        """Memory of the host blocks of all kinds."""
        windows = [cache_bytes(kind.host_blocks, kind.block_bytes) for kind in self.windows]
        return cache_bytes(self.host_blocks, self.block_bytes) + sum(windows)

    def requests(self, tokens: int) -> int:
        """Return the number of requests of `tokens` tokens that fit with paging, in all kinds of blocks."""
        whole, size = self.pool.blocks_of(tokens), self.block_size
        in_windows = [kind.device_blocks // min(whole, kind.most_blocks(size, size)) for kind in self.windows]
        return min(self.pool.requests(tokens), *in_windows) if in_windows else self.pool.requests(tokens)

    def figures(self) -> dict[str, Any]:
        """Return all values by name, for machines."""
        pool = self.pool
        return asdict(self) | {
            "cache_bytes": self.cache_bytes,
            "host_cache_bytes": self.host_cache_bytes,
            "tokens": pool.tokens,
            "requests_of_full_context": self.requests(self.context_tokens),
            "requests_in_blocks": self.requests(self.typical_tokens),
            "requests_reserving_the_context": pool.reserved_requests(self.context_tokens),
            "empty_slots_per_request": pool.last_block_waste(),
            "max_requests": self.max_requests,
        }


class Planner:
    """Makes plans for one model on one kind of device."""

    def __init__(
        self,
        shape: ModelShape,
        dtype: torch.dtype,
        workload: Workload,
        *,
        on_gpu: bool,
        kv_dtype: torch.dtype | None = None,
        kinds: bool = False,
    ) -> None:
        """`shape` is that of the model with weights of `dtype`. The cache has `kv_dtype`, by default the same type.

        With `kinds`, layers with a window keep only what they see.
        """
        self._shape = shape
        self._dtype = dtype
        self._workload = workload
        self._on_gpu = on_gpu
        self._cache_dtype = kv_dtype or dtype
        found = layer_kinds(shape.geometry, shape.context_tokens) if kinds else ()
        self._kinds = found if len(found) > 1 else one_kind(shape.geometry)
        shapes = [kind.geometry(shape.geometry) for kind in self._kinds]
        self._block_bytes = [one.block_bytes(workload.block_size, self._cache_dtype) for one in shapes]
        # On a GPU, context and libraries fit into the memory that the utilization leaves free.
        self._process_bytes = 0 if on_gpu else CPU_PROCESS_BYTES
        packed = shape.packed.packed and not on_gpu
        self._weights_bytes = shape.packed.packed + shape.packed.loaded if packed else shape.weights_bytes

    def for_memory(self, memory_bytes: int, utilization: float, host_memory_bytes: int) -> MemoryPlan:
        """Return the plan for this share of a device's memory. Raises DoesNotFit."""
        fixed = self._fixed_bytes(host_memory_bytes)
        sequences = self._sequences(lambda count: self._blocks_of(memory_bytes, utilization, fixed, count)[0])
        blocks = self._blocks_of(memory_bytes, utilization, fixed, sequences)
        if not blocks[0]:
            usable = _gib(int(memory_bytes * utilization))
            needed = _gib(fixed + self._step_bytes(sequences) + self._cache_bytes((1, *blocks[1:])))
            raise DoesNotFit(f"{usable} of it can be used, but a pool of one block needs {needed}")
        return self._plan(memory_bytes, utilization, blocks, sequences, host_memory_bytes)

    def for_blocks(self, blocks: int, utilization: float, host_memory_bytes: int) -> MemoryPlan:
        """Return the plan for a pool of `blocks` blocks of kind 0."""
        sequences = self._sequences(lambda _: blocks)
        split = split_blocks(self._kinds, blocks, self._split_sizes(sequences))
        needed = self._fixed_bytes(host_memory_bytes) + self._step_bytes(sequences) + self._cache_bytes(split)
        return self._plan(math.ceil(needed / utilization), utilization, split, sequences, host_memory_bytes)

    def for_cache(self, memory_bytes: int, utilization: float, host_memory_bytes: int) -> MemoryPlan:
        """Return the plan for a cache of this memory."""
        sequences = self._sequences(lambda count: self._split(memory_bytes, count)[0])
        split = self._split(memory_bytes, sequences)
        needed = self._fixed_bytes(host_memory_bytes) + self._step_bytes(sequences) + self._cache_bytes(split)
        return self._plan(math.ceil(needed / utilization), utilization, split, sequences, host_memory_bytes)

    def blocks_for(self, requests: int) -> int:
        """Return the blocks that `requests` typical requests need at the same time."""
        return requests * PoolSize(self._workload.block_size, 0).blocks_of(self._workload.typical_tokens)

    def blocks_within(self, memory_bytes: int) -> int:
        """Return the blocks that fit into this memory, which may be negative."""
        return blocks_within(max(0, memory_bytes), self._block_bytes[0] or 1)

    def _split_sizes(self, sequences: int) -> SplitSizes:
        load = self._workload
        sizes = load.block_size, load.context_tokens, load.token_budget, sequences
        return SplitSizes(*sizes, load.typical_tokens)

    def _split(self, memory_bytes: int, sequences: int) -> tuple[int, ...]:
        return split_memory(self._kinds, self._block_bytes, max(0, memory_bytes), self._split_sizes(sequences))

    def _cache_bytes(self, blocks: Sequence[int]) -> int:
        return sum(cache_bytes(*one) for one in zip(blocks, self._block_bytes, strict=True))

    def _plan(
        self,
        memory_bytes: int,
        utilization: float,
        blocks: Sequence[int],
        sequences: int,
        host_memory_bytes: int,
    ) -> MemoryPlan:
        host_blocks = self.blocks_within(host_memory_bytes)
        hosts = host_blocks_of(self._kinds, host_blocks, self._split_sizes(sequences))
        columns = list(zip(self._kinds, blocks, hosts, self._block_bytes, strict=True))
        return MemoryPlan(
            memory_bytes=memory_bytes,
            memory_utilization=utilization,
            weights_bytes=self._weights_bytes,
            process_bytes=self._process_bytes,
            step_bytes=self._step_bytes(sequences),
            token_bytes=self._kinds[0].geometry(self._shape.geometry).block_bytes(1, self._cache_dtype),
            block_bytes=self._block_bytes[0],
            block_size=self._workload.block_size,
            device_blocks=blocks[0],
            context_tokens=self._workload.context_tokens,
            typical_tokens=self._workload.typical_tokens,
            max_sequences=sequences,
            token_budget=self._workload.token_budget,
            host_blocks=host_blocks,
            windows=tuple([kind.window(*numbers) for kind, *numbers in columns[1:]]),
        )

    def _blocks_of(self, memory_bytes: int, utilization: float, fixed: int, sequences: int) -> tuple[int, ...]:
        """Return the blocks of each kind that fit beside a step of `sequences` sequences, 0 of kind 0 if none does."""
        used = fixed + self._step_bytes(sequences)
        if not self._on_gpu:
            return self._split(int(memory_bytes * utilization) - used, sequences)
        try:  # as at the engine's start, which measures what is used and free
            free = memory_bytes - used - self._recorded_bytes(sequences)
            return (blocks_on_gpu(memory_bytes, utilization, used, free, self._block_bytes[0]),)
        except DoesNotFit:
            return (0,)

    def _fixed_bytes(self, host_memory_bytes: int) -> int:
        """Return the memory in use before the first block. On a CPU both tiers share the same memory."""
        host_bytes = 0
        if not self._on_gpu:
            hosts = host_blocks_of(self._kinds, self.blocks_within(host_memory_bytes), self._split_sizes(1))
            host_bytes = self._cache_bytes(hosts)
        return self._weights_bytes + self._process_bytes + host_bytes

    def _step_bytes(self, sequences: int) -> int:
        sizes = self._shape.step_sizes(self._workload.token_budget, sequences)
        return sizes.bytes(self._dtype.itemsize)

    def _recorded_bytes(self, sequences: int) -> int:
        blocks = blocks_for(self._workload.context_tokens, self._workload.block_size)
        return self._shape.recorded_sizes(sequences, blocks).reserved

    def _sequences(self, blocks: Callable[[int], int]) -> int:
        """Return the largest number of sequences whose step leaves the blocks they need."""
        if self._workload.max_sequences:
            return self._workload.max_sequences
        size, tokens = self._workload.block_size, self._workload.typical_tokens
        # More sequences leave fewer blocks, so the counts that do not fit are the upper ones.
        counts = range(1, self._workload.token_budget + 1)
        return max(1, bisect(counts, 0, key=lambda count: PoolSize(size, blocks(count)).requests(tokens) < count))


def _gib(size: int) -> str:
    return f"{size / 1024**3:.2f} GiB"
