"""The protocol of attention backends, and the batch they work on."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import torch

from blocks import Copy, blocks_for
from engine.attention.upload import Integers, upload
from engine.schedule.step_plan import Work


class Scoring(NamedTuple):
    """Scoring of keys in one layer: factor of q.k, sliding window (tokens), and softcap of the scores.

    `sinks`: `[heads]`, a learned score of each query head that takes part in the softmax without a key (Xiao et al.,
    "Efficient Streaming Language Models with Attention Sinks", 2024, in GPT-OSS's form). It is not capped.
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


class Rows(NamedTuple):
    """Sequences of one batch that feed the same number of tokens.

    `tokens`: `[rows, fed]` positions in the flattened batch. `tables`: `[rows, blocks]` block ids, padded with block 0.
    `ends`: `[rows]` lengths of the sequences, fed tokens included. All int64.
    """

    tokens: torch.Tensor
    tables: torch.Tensor
    ends: torch.Tensor


class Direction(Enum):
    """Direction of a copy between the tiers."""

    DEVICE_TO_HOST = auto()
    HOST_TO_DEVICE = auto()


@dataclass(frozen=True)
class PagedBatch:
    """The metadata of one step: all sequences flattened into one row of tokens.

    `fed`: number of tokens of each sequence; on the host, so that launches need not synchronize with the device.
    `slots`: `[tokens]` int64, where each token's K and V are stored: block id * block_size + offset. `first`:
    `[sequences + 1]` int32, index of each sequence's first token. `ends`: `[sequences]` int32 lengths, fed tokens
    included. `tables`: `[sequences, blocks]` int32 block ids, padded with block 0; so are blocks out of a window.

    These are the slots and tables of kind 0. `windows` has the same batch for each window kind.
    """

    block_size: int
    fed: tuple[int, ...]
    slots: torch.Tensor
    first: torch.Tensor
    ends: torch.Tensor
    tables: torch.Tensor
    windows: "tuple[PagedBatch, ...]" = ()

    @classmethod
    def of(cls, work: Sequence[Work], block_size: int, device: torch.device) -> "PagedBatch":
        """Build the batch of a plan's work, in its order."""
        windows = zip(*[item.window_tables for item in work], strict=True)
        own = cls._of_tables(work, [item.block_table for item in work], block_size, device)
        return replace(own, windows=tuple([cls._of_tables(work, tables, block_size, device) for tables in windows]))

    def of_kind(self, kind: int) -> "PagedBatch":
        """Return the batch of a kind of blocks."""
        return self.windows[kind - 1] if kind else self

    @classmethod
    def _of_tables(
        cls, work: Sequence[Work], block_tables: Sequence[tuple[int, ...]], block_size: int, device: torch.device
    ) -> "PagedBatch":
        fed = tuple([len(item.token_ids) for item in work])
        tables = np.zeros((len(work), max(map(len, block_tables), default=0)), dtype=np.int32)
        for row, table in zip(tables, block_tables, strict=True):
            row[: len(table)] = table
        return cls(
            block_size=block_size,
            fed=fed,
            slots=upload(_slots(work, fed, tables, block_size), torch.int64, device),
            first=upload(np.array([0, *accumulate(fed)], dtype=np.int32), torch.int32, device),
            ends=upload(np.array([item.end for item in work], dtype=np.int32), torch.int32, device),
            tables=upload(tables, torch.int32, device),
        )

    @cached_property
    def rows(self) -> tuple[Rows, ...]:
        """The sequences grouped by number of fed tokens: all decoding ones together, each prompt separately."""
        first = [0, *accumulate(self.fed)]
        decoding = [number for number, count in enumerate(self.fed) if count == 1]
        groups = ([decoding] if decoding else []) + [[number] for number, count in enumerate(self.fed) if count > 1]
        return tuple(self._rows(group, first, self.fed[group[0]]) for group in groups)

    def _rows(self, group: list[int], first: list[int], fed: int) -> Rows:
        device = self.slots.device
        tokens = [list(range(first[number], first[number] + fed)) for number in group]
        chosen = torch.tensor(group, dtype=torch.int64, device=device)
        ends = self.ends[chosen].to(torch.int64)
        widest = blocks_for(int(ends.max()), self.block_size)
        return Rows(
            torch.tensor(tokens, dtype=torch.int64, device=device), self.tables[chosen, :widest].to(torch.int64), ends
        )


class AttentionBackend(Protocol):
    """Writes K and V into blocks, attends through block tables, and copies blocks within and between tiers.

    The backend defines the order of elements inside a (block, layer).
    """

    def part_shape(self, kv_heads: int, size: int) -> tuple[int, ...]:
        """Return the shape of a layer's K (or V) in one block, from its KV heads and the elements of a head."""

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, batch: PagedBatch) -> None:
        """Store `[tokens, kv_heads, key_size]` K and `[tokens, kv_heads, value_size]` V at the batch's slots."""

    def attend(self, layer: int, query: torch.Tensor, batch: PagedBatch, scoring: Scoring) -> torch.Tensor:
        """Attend causally with `[tokens, heads, key_size]` queries; return `[tokens, heads, value_size]`.

        K and V of the fed tokens must have been written. Query head h reads KV head h // (heads / kv_heads).
        """

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        """Copy whole blocks, all layers; no destination is a source."""

    def swap(self, copies: Sequence[Copy], direction: Direction) -> None:
        """Copy whole blocks, all layers, byte for byte to the other tier; destinations are distinct.

        Requires a host tier. On a GPU the copies are queued on the current stream.
        """


def _slots(work: Sequence[Work], fed: Sequence[int], tables: Integers, block_size: int) -> Integers:
    """Return `[tokens]` int64 slots of the fed tokens."""
    if max(fed, default=1) == 1:  # most steps only decode
        slots = [
            int(table[item.start // block_size]) * block_size + item.start % block_size
            for item, table in zip(work, tables, strict=True)
        ]
        return np.array(slots, dtype=np.int64)
    parts = []
    for item, table in zip(work, tables, strict=True):
        positions = np.arange(item.start, item.end)
        parts.append(table[positions // block_size].astype(np.int64) * block_size + positions % block_size)
    return np.concatenate(parts)
