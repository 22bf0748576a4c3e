"""An attention backend for layers of several kinds: a backend of its own for each kind, with its own cache."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Generic, Protocol, TypeVar, overload

import torch
from torch.nn.utils.rnn import pad_sequence

from blocks import Copy, blocks_for
from engine.attention.backend import AttentionBackend, Direction, PagedBatch, Scoring
from engine.attention.cache import CacheGeometry
from engine.kinds.layer_kinds import LayerKind, places_of


class CachingBackend(AttentionBackend, Protocol):
    """An attention backend whose caches are tensors."""

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        ...

    @property
    def cache(self) -> torch.Tensor:
        """The blocks of the device tier."""
        ...

    @property
    def host_cache(self) -> torch.Tensor | None:
        """The blocks of the host tier, None without one."""
        ...


A = TypeVar("A")
B = TypeVar("B", bound=CachingBackend)


class KindsBackend(Generic[B]):
    """Passes the calls of each layer to the backend of its kind, with the tables and slots of that kind."""

    def __init__(self, kinds: Sequence[LayerKind], backends: Sequence[B]) -> None:
        """Combine the backends of the kinds. Each has the layers of its kind, in their order."""
        self.layer_kinds = tuple(kinds)
        self.kinds = tuple(backends)
        self._places = places_of(kinds)
        self._in_chunks: dict[int, tuple[PagedBatch, PagedBatch]] = {}  # by kind: the latest batch, and its chunks

    @classmethod
    def of(
        cls, kinds: Sequence[LayerKind], geometry: CacheGeometry, make: Callable[[CacheGeometry, int], B]
    ) -> "KindsBackend[B]":
        """Make the backend of each kind: `make` receives the shapes of its layers and its number."""
        return cls(kinds, [make(kind.geometry(geometry), number) for number, kind in enumerate(kinds)])

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.kinds[0].block_size

    @property
    def cache(self) -> torch.Tensor:
        """The cache of kind 0, whose number of blocks bounds the tokens of all sequences."""
        return self.kinds[0].cache

    @property
    def host_cache(self) -> torch.Tensor | None:
        """The host tier of kind 0."""
        return self.kinds[0].host_cache

    def part_shape(self, kv_heads: int, size: int) -> tuple[int, ...]:
        """See AttentionBackend."""
        return self.kinds[0].part_shape(kv_heads, size)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, batch: PagedBatch) -> None:
        """Write to the slots of the layer's kind."""
        kind, index = self._places[layer]
        self.kinds[kind].write(index, key, value, batch.of_kind(kind))

    def attend(self, layer: int, query: torch.Tensor, batch: PagedBatch, scoring: Scoring) -> torch.Tensor:
        """Attend to the blocks of the layer's kind."""
        kind, index = self._places[layer]
        return self.kinds[kind].attend(index, query, self._attended(kind, batch), scoring)

    def _attended(self, kind: int, batch: PagedBatch) -> PagedBatch:
        """Return the batch of a kind; all layers of a step share that of its chunks."""
        own, of = batch.of_kind(kind), self.layer_kinds[kind]
        if not of.chunked:
            return own
        latest = self._in_chunks.get(kind)
        if latest is None or latest[0] is not own:
            latest = self._in_chunks[kind] = (own, in_chunks(own, of.tokens))
        return latest[1]

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        """Copy blocks of kind 0."""
        self.kinds[0].copy_blocks(copies)

    def swap(self, copies: Sequence[Copy], direction: Direction) -> None:
        """Copy blocks of kind 0 to the other tier."""
        self.kinds[0].swap(copies, direction)


def in_chunks(batch: PagedBatch, tokens: int) -> PagedBatch:
    """Split each sequence of a batch at the ends of its chunks, which are whole blocks.

    A token sees its own chunk up to itself, so each part is computed as a sequence that begins with the chunk.
    """
    fed, ends, parts = [], [], []
    for row, (count, end) in enumerate(zip(batch.fed, batch.ends.tolist(), strict=True)):
        position = end - count
        while position < end:
            start = position - position % tokens
            stop = min(end, start + tokens)
            fed.append(stop - position)
            ends.append(stop - start)
            first = start // batch.block_size
            parts.append(batch.tables[row, first : first + blocks_for(stop - start, batch.block_size)])
            position = stop
    device = batch.tables.device
    return replace(
        batch,
        fed=tuple(fed),
        first=torch.tensor([0, *accumulate(fed)], dtype=torch.int32, device=device),
        ends=torch.tensor(ends, dtype=torch.int32, device=device),
        tables=pad_sequence(parts, batch_first=True) if parts else batch.tables,
        windows=(),
    )


@overload
def backends_of(backend: KindsBackend[B]) -> tuple[B, ...]: ...
@overload
def backends_of(backend: A) -> tuple[A, ...]: ...
def backends_of(backend: object) -> tuple[object, ...]:
    """Return the backend of each kind, kind 0 first."""
    return backend.kinds if isinstance(backend, KindsBackend) else (backend,)
