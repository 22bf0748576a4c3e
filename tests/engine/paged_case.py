"""A batch for an attention backend, compared with naive float64 attention."""

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple, Protocol

import torch

from blocks import Copy, blocks_for
from engine.attention import AttentionBackend, PagedBatch, TorchBackend
from engine.attention.backend import Direction, Scoring
from engine.attention.cache import CacheGeometry, LayerShape
from engine.attention.codes import decode, encode
from engine.schedule.request import Sampling
from engine.schedule.step_plan import Work

CPU = torch.device("cpu")
PLAIN = Scoring(0.25)
# How a sequence's blocks are moved before attention: within the device, or to the host and back.
Moved = Literal["copied", "swapped"]


class CachedBackend(AttentionBackend, Protocol):
    """A backend with an accessible cache."""

    cache: torch.Tensor


class MakeBackend(Protocol):
    """Creates a backend with this many device and host blocks."""

    def __call__(
        self,
        geometry: CacheGeometry,
        block_size: int,
        device_blocks: int,
        dtype: torch.dtype,
        /,
        *,
        host_blocks: int = 0,
    ) -> CachedBackend: ...


class Feed(NamedTuple):
    """A sequence of a batch: number of cached tokens (`prefix`) and of fed tokens."""

    prefix: int
    fed: int


@dataclass
class Case:
    """Shapes of a batch, computed on the backend's device. All layers but the last must stay unchanged.

    With `coded`, the backend's cache has codes, and attention is compared with that over the decoded K and V. The other
    layers have other shapes if V has another `value_size` than K's `head_size`. `sinks` are random, far apart.
    """

    feeds: Sequence[Feed]
    block_size: int = 16
    kv_heads: int = 2
    group: int = 2
    head_size: int = 8
    scoring: Scoring = PLAIN
    layers: int = 2
    poison: float = math.nan
    seed: int = 0
    dtype: torch.dtype = torch.float32
    moved: Moved | None = None
    coded: bool = False
    value_size: int = 0
    sinks: bool = False
    make: MakeBackend = TorchBackend
    tables: list[list[int]] = field(default_factory=list)

    @property
    def geometry(self) -> CacheGeometry:
        if not self.value_size:
            return CacheGeometry.uniform(self.layers, self.kv_heads, self.head_size)
        others = (LayerShape(self.kv_heads + 1, self.value_size, self.head_size),) * (self.layers - 1)
        return CacheGeometry((*others, LayerShape(self.kv_heads, self.head_size, self.value_size)))

    def run(self) -> float:
        """Return the largest error of paged attention over all fed tokens."""
        found, drawn = self.attend()
        expected = drawn.expected(self._scoring(), coded=self.coded)
        assert (found.shape, found.dtype) == (expected.shape, self.dtype)
        return float((found - expected).abs().max().nan_to_num(math.inf))

    def attend(self) -> tuple[torch.Tensor, "Drawn"]:
        """Return paged attention of all fed tokens, and the numbers that it was computed from."""
        sizes = self.head_size, self.value_size or self.head_size
        drawn = draw(tuple(self.feeds), self.kv_heads, self.group, sizes, self.dtype, self.seed)
        used = sum(blocks_for(prefix + fed, self.block_size) for prefix, fed in self.feeds)
        blocks = (used if self.moved is None else 2 * used) + 3
        host_blocks = blocks if self.moved == "swapped" else 0
        backend = self.make(self.geometry, self.block_size, blocks, self.dtype, host_blocks=host_blocks)
        device = backend.cache.device
        backend.cache.fill_(self._poison(backend))
        unused = self._scatter_tables(blocks)
        layer = self.layers - 1
        if cached := [(number, 0, prefix) for number, (prefix, _) in enumerate(self.feeds) if prefix]:
            prefixes = (
                torch.cat([whole[number][:prefix] for number, _, prefix in cached]).to(device, self.dtype)
                for whole in (drawn.keys, drawn.values)
            )
            backend.write(layer, *prefixes, self._batch(cached, device))
        self._move(backend, unused)
        batch = self._batch([(number, prefix, fed) for number, (prefix, fed) in enumerate(self.feeds)], device)
        fed_keys, fed_values = (
            torch.cat([whole[feed.prefix :] for whole, feed in zip(wholes, self.feeds, strict=True)])
            for wholes in (drawn.keys, drawn.values)
        )
        backend.write(layer, fed_keys.to(device, self.dtype), fed_values.to(device, self.dtype), batch)
        with new_tensors_are_nan():
            found = backend.attend(layer, torch.cat(drawn.queries).to(device, self.dtype), batch, self._scoring(device))
        return found.cpu(), drawn

    def _scoring(self, device: torch.device = CPU) -> Scoring:
        if not self.sinks:
            return self.scoring
        return self.scoring._replace(sinks=sinks_of(self.kv_heads * self.group, self.seed).to(device))

    def _poison(self, backend: CachedBackend) -> float:
        return self.poison if backend.cache.is_floating_point() else -1  # scales are NaN then

    def _scatter_tables(self, blocks: int) -> list[int]:
        """Give each sequence random blocks; return the unused ones."""
        free = list(range(1, blocks + 1))
        random.Random(self.seed).shuffle(free)
        self.tables = [
            [free.pop() for _ in range(blocks_for(prefix + fed, self.block_size))] for prefix, fed in self.feeds
        ]
        return free

    def _move(self, backend: CachedBackend, unused: list[int]) -> None:
        """Move the contents to other blocks, and poison the old ones."""
        if self.moved is None:
            return
        moves = {block: unused.pop() for table in self.tables for block in table}
        if self.moved == "copied":
            backend.copy_blocks([Copy(*move) for move in moves.items()])
        else:
            # The host's ids are in another order than those of the device.
            hosts = dict(zip(moves, reversed(range(1, len(moves) + 1)), strict=True))
            backend.swap([Copy(block, host) for block, host in hosts.items()], Direction.DEVICE_TO_HOST)
            back = [Copy(hosts[block], target) for block, target in moves.items()]
            backend.cache[list(moves)] = self._poison(backend)
            backend.swap(back, Direction.HOST_TO_DEVICE)
        backend.cache[list(moves)] = self._poison(backend)
        self.tables = [[moves[block] for block in table] for table in self.tables]

    def _batch(self, parts: list[tuple[int, int, int]], device: torch.device) -> PagedBatch:
        work = []
        for number, start, count in parts:
            table = self.tables[number][: blocks_for(start + count, self.block_size)]
            work.append(Work(number, (0,) * count, start, tuple(table), True, Sampling()))
        return PagedBatch.of(work, self.block_size, device)


class Drawn(NamedTuple):
    """K, V and queries of each sequence, `[tokens, heads, size]` float64."""

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    queries: tuple[torch.Tensor, ...]
    outputs: dict[object, torch.Tensor]

    def expected(self, scoring: Scoring, *, coded: bool = False) -> torch.Tensor:
        """Return the naive attention of all fed tokens, over decoded K and V if `coded`; cached because it is slow."""
        key = (scoring._replace(sinks=None), None if scoring.sinks is None else tuple(scoring.sinks.tolist()), coded)
        if key not in self.outputs:
            keys, values = (
                [decode(encode(one)).double() for one in whole] if coded else whole
                for whole in (self.keys, self.values)
            )
            sequences = zip(self.queries, keys, values, strict=True)
            self.outputs[key] = torch.cat([naive_attention(*sequence, scoring) for sequence in sequences])
        return self.outputs[key]


@lru_cache(maxsize=4)
def draw(
    feeds: tuple[Feed, ...], kv_heads: int, group: int, sizes: tuple[int, int], dtype: torch.dtype, seed: int
) -> Drawn:
    """Draw numbers representable in the cache's dtype, so that only computation causes errors."""
    torch.manual_seed(seed)

    def random_rows(tokens: int, heads: int, size: int) -> torch.Tensor:
        return (torch.randn(tokens, heads, size, dtype=torch.float64) * 2).to(dtype).double()

    keys, values = (tuple(random_rows(sum(feed), kv_heads, size) for feed in feeds) for size in sizes)
    return Drawn(keys, values, tuple(random_rows(feed.fed, kv_heads * group, sizes[0]) for feed in feeds), {})


def sinks_of(heads: int, seed: int) -> torch.Tensor:
    """Return a sink of each head, float32: some that take nearly all of the weight, and some that take next to none."""
    return torch.randn(heads, generator=torch.Generator().manual_seed(seed)) * 30


@contextmanager
def new_tensors_are_nan() -> Iterator[None]:
    """Fill new tensors with NaN, or the largest integer, so that unwritten rows are detected."""
    assert torch.utils.deterministic.fill_uninitialized_memory, "torch's default"
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def naive_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """Attend token by token; the queries are those of the last tokens."""
    tokens, (fed, heads, size), kv_heads = len(key), query.shape, key.shape[1]
    output = query.new_empty(fed, heads, value.shape[2])
    for row in range(fed):
        position = tokens - fed + row
        seen = slice(0 if scoring.window is None else max(0, position - scoring.window + 1), position + 1)
        grouped = query[row].view(kv_heads, heads // kv_heads, size)
        scores = torch.einsum("tkd,kgd->tkg", key[seen], grouped) * scoring.scaling
        if scoring.softcap is not None:
            scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
        if scoring.sinks is not None:
            scores = torch.cat([scores, scoring.sinks.to(scores).view(1, kv_heads, -1)])
        weights = scores.softmax(0)[: len(value[seen])]
        output[row] = torch.einsum("tkg,tkd->kgd", weights, value[seen]).flatten(0, 1)
    return output
