"""Memory of a model by purpose, and the number of blocks that remain: the result of `quire plan`."""

import math
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from blocks import WindowKind, blocks_for
from engine.kept.header import kept_bytes_for
from engine.kinds.layer_kinds import LayerKind, one_kind
from engine.kinds.split import SplitSizes, host_blocks_of, host_blocks_within, split_blocks, split_memory
from engine.model.model_shape import ModelShape
from engine.model.sizing import DoesNotFit, PoolSize, blocks_on_gpu, cache_bytes

# An engine's process on a CPU: Python, torch, transformers and the libraries of its service.
CPU_PROCESS_BYTES = 768 << 20
# Requests of a gateway for each sequence of the engine: enough waiting to keep the batch full.
_REQUESTS_PER_SEQUENCE = 1.25
_MIB = 1 << 20


@dataclass(frozen=True)
class Workload:
    """Limits of the engine that cost memory, and request lengths in tokens.

    `context_tokens` is the longest request; `lengths` are prompt and answer of a typical one. Without `max_sequences`
    it is as many as fit, at most `token_budget`. Memory is split among kinds of blocks for requests of `split_tokens`
    tokens, without it for typical ones.
    """

    block_size: int
    token_budget: int
    context_tokens: int
    max_sequences: int | None = None
    lengths: tuple[int, int] | None = None
    split_tokens: int | None = None

    @property
    def typical_tokens(self) -> int:
        """Tokens of a typical request: prompt and answer. Default: a request that fills the context."""
        return sum(self.lengths) if self.lengths else self.context_tokens


@dataclass(frozen=True)
class MemoryPlan:
    """Memory in bytes by purpose, and the size of the pool. `memory_bytes` is the memory that the device must have.

    Tokens and blocks are those of kind 0; `windows` are the other kinds of blocks. With several kinds, an engine splits
    `cache_mib` MiB for requests of `split_tokens` tokens in the same way; it is 0 if `device_blocks` was given.
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
    split_tokens: int
    windows: tuple[WindowKind, ...] = ()
    cache_mib: int = 0

    @property
    def pool(self) -> PoolSize:
        """The pool of the device."""
        return PoolSize(self.block_size, self.device_blocks)

    @property
    def max_requests(self) -> int:
        """Recommended max_requests of a gateway with this engine only."""
        return max(1, math.ceil(_REQUESTS_PER_SEQUENCE * self.max_sequences))

    @property
    def all_blocks(self) -> int:
        """Blocks of both tiers and all kinds, as a KV manager counts them."""
        return self.device_blocks + self.host_blocks + sum(one.device_blocks + one.host_blocks for one in self.windows)

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
        return _requests_in(self.pool, self.windows, tokens)

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
        kinds: Sequence[LayerKind] = (),
    ) -> None:
        """Plan for the model of `shape`, with weights in `dtype`. The cache uses `kv_dtype`, by default the same type.

        `kinds` are the kinds of blocks of its layers; without them, all layers keep all tokens.
        """
        self._shape = shape
        self._dtype = dtype
        self._workload = workload
        self._on_gpu = on_gpu
        self._cache_dtype = kv_dtype or dtype
        self._kinds = tuple(kinds) or one_kind(shape.geometry)
        shapes = [kind.geometry(shape.geometry) for kind in self._kinds]
        self._block_bytes = [one.block_bytes(workload.block_size, self._cache_dtype) for one in shapes]
        # On a GPU, context and libraries fit into the memory that the utilization leaves free.
        self._process_bytes = 0 if on_gpu else CPU_PROCESS_BYTES
        packed = shape.packed.packed and not on_gpu
        self._weights_bytes = shape.packed.packed + shape.packed.loaded if packed else shape.weights_bytes

    def for_memory(self, memory_bytes: int, utilization: float, host_memory_bytes: int) -> MemoryPlan:
        """Return the plan for this share of a device's memory. Raises DoesNotFit."""
        fixed = self._fixed_bytes(host_memory_bytes)
        sequences = self._sequences(lambda count: self._blocks_of(memory_bytes, utilization, fixed, count))
        blocks = self._blocks_of(memory_bytes, utilization, fixed, sequences)
        if not blocks[0]:
            usable = _gib(int(memory_bytes * utilization))
            needed = _gib(fixed + self._step_bytes(sequences) + self._cache_bytes((1, *blocks[1:])))
            raise DoesNotFit(f"{usable} of it can be used, but a pool of one block needs {needed}")
        found = self._plan(memory_bytes, utilization, blocks, sequences, host_memory_bytes)
        return self._with_cache_mib(found, self._room(memory_bytes, utilization, fixed, sequences))

    def for_blocks(self, blocks: int, utilization: float, host_memory_bytes: int) -> MemoryPlan:
        """Return the plan for a pool of `blocks` blocks of kind 0."""
        sequences = self._sequences(lambda count: split_blocks(self._kinds, blocks, self._split_sizes(count)))
        split = split_blocks(self._kinds, blocks, self._split_sizes(sequences))
        needed = self._fixed_bytes(host_memory_bytes) + self._step_bytes(sequences) + self._cache_bytes(split)
        return self._plan(math.ceil(needed / utilization), utilization, split, sequences, host_memory_bytes)

    def for_cache(self, memory_bytes: int, utilization: float, host_memory_bytes: int) -> MemoryPlan:
        """Return the plan for a cache of this memory."""
        sequences = self._sequences(lambda count: self._split(memory_bytes, count))
        split = self._split(memory_bytes, sequences)
        needed = self._fixed_bytes(host_memory_bytes) + self._step_bytes(sequences) + self._cache_bytes(split)
        found = self._plan(math.ceil(needed / utilization), utilization, split, sequences, host_memory_bytes)
        return self._with_cache_mib(found, memory_bytes)

    def blocks_for(self, requests: int) -> int:
        """Return the blocks that `requests` typical requests need at the same time."""
        return requests * PoolSize(self._workload.block_size, 0).blocks_of(self._workload.typical_tokens)

    def host_blocks_within(self, memory_bytes: int) -> int:
        """Return how many host blocks kind 0 gets if all kinds share this memory."""
        return host_blocks_within(self._kinds, self._block_bytes, memory_bytes, self._split_sizes(1))

    @property
    def _split_tokens(self) -> int:
        return self._workload.split_tokens or self._workload.typical_tokens

    def _split_sizes(self, sequences: int) -> SplitSizes:
        """Return the sizes that an engine has, which serves the whole context of the model."""
        load = self._workload
        sizes = load.block_size, self._shape.context_tokens, load.token_budget, sequences
        return SplitSizes(*sizes, self._split_tokens)

    def _split(self, memory_bytes: int, sequences: int) -> tuple[int, ...]:
        return split_memory(self._kinds, self._block_bytes, max(0, memory_bytes), self._split_sizes(sequences))

    def _with_cache_mib(self, plan: MemoryPlan, memory_bytes: int) -> MemoryPlan:
        return replace(plan, cache_mib=memory_bytes // _MIB) if len(self._kinds) > 1 else plan

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
        host_blocks = self.host_blocks_within(host_memory_bytes)
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
            split_tokens=self._split_tokens,
            windows=tuple([kind.window(*numbers) for kind, *numbers in columns[1:]]),
        )

    def _blocks_of(self, memory_bytes: int, utilization: float, fixed: int, sequences: int) -> tuple[int, ...]:
        """Return the blocks of each kind that fit beside a step of `sequences` sequences, 0 of kind 0 if none does."""
        if not self._on_gpu:
            return self._split(self._room(memory_bytes, utilization, fixed, sequences), sequences)
        used = fixed + self._step_bytes(sequences)
        try:  # as at the engine's start, which measures what is used and free
            free = memory_bytes - used - self._recorded_bytes(sequences)
            return (blocks_on_gpu(memory_bytes, utilization, used, free, self._block_bytes[0]),)
        except DoesNotFit:
            return (0,)

    def _room(self, memory_bytes: int, utilization: float, fixed: int, sequences: int) -> int:
        """Return the memory of the cache on a CPU. Several kinds share whole MiB, because an engine splits such."""
        room = max(0, int(memory_bytes * utilization) - fixed - self._step_bytes(sequences))
        return room // _MIB * _MIB if len(self._kinds) > 1 else room

    def _fixed_bytes(self, host_memory_bytes: int) -> int:
        """Return the memory in use before the first block. On a CPU both tiers share the same memory."""
        host_bytes = 0
        if not self._on_gpu:
            hosts = host_blocks_of(self._kinds, self.host_blocks_within(host_memory_bytes), self._split_sizes(1))
            host_bytes = self._cache_bytes(hosts)
        return self._weights_bytes + self._process_bytes + host_bytes

    def _step_bytes(self, sequences: int) -> int:
        sizes = self._shape.step_sizes(self._workload.token_budget, sequences)
        return sizes.bytes(self._dtype.itemsize)

    def _recorded_bytes(self, sequences: int) -> int:
        blocks = blocks_for(self._workload.context_tokens, self._workload.block_size)
        return self._shape.recorded_sizes(sequences, blocks).reserved

    def _sequences(self, blocks: Callable[[int], Sequence[int]]) -> int:
        """Return the largest number of sequences whose step leaves the blocks of each kind that they need."""
        if self._workload.max_sequences:
            return self._workload.max_sequences

        def held(count: int) -> int:
            whole, *others = blocks(count)
            windows = [kind.window(number, 0, 0) for kind, number in zip(self._kinds[1:], others, strict=True)]
            return _requests_in(PoolSize(self._workload.block_size, whole), windows, self._workload.typical_tokens)

        # More sequences leave fewer blocks, so the counts that do not fit are the upper ones.
        counts = range(1, self._workload.token_budget + 1)
        return max(1, bisect(counts, 0, key=lambda count: held(count) < count))


def _requests_in(pool: PoolSize, windows: Sequence[WindowKind], tokens: int) -> int:
    """Return the requests of `tokens` tokens that fit into kind 0 and into each window kind."""
    whole, size = pool.blocks_of(tokens), pool.block_size
    in_windows = [kind.device_blocks // min(whole, kind.most_blocks(size, size)) for kind in windows]
    return min([pool.requests(tokens), *in_windows])


def _gib(size: int) -> str:
    return f"{size / 1024**3:.2f} GiB"
