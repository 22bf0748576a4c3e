"""What an attention backend does, and the batch it does it for."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, Protocol

import torch

from engine.blocks import Copy
from engine.plan import Work


class Scoring(NamedTuple):
    """How a layer scores keys: the factor of q.k, how far back it looks, and the bound of its scores."""

    scaling: float
    window: int | None = None
    softcap: float | None = None


class Rows(NamedTuple):
    """Sequences of one batch that feed equally many tokens.

    `tokens`: `[rows, fed]` positions in the flattened batch. `tables`: `[rows, blocks]` block ids, padded with block 0.
    `ends`: `[rows]` tokens of each sequence, those fed included. All int64.
    """

    tokens: torch.Tensor
    tables: torch.Tensor
    ends: torch.Tensor


class Direction(Enum):
    """From which tier to which blocks are copied."""

    DEVICE_TO_HOST = auto()
    HOST_TO_DEVICE = auto()


@dataclass(frozen=True)
class PagedBatch:
    """The metadata of one step: all sequences flattened into one row of tokens.

    `slots`: `[tokens]` int64, where each token's K and V go: block id * block_size + offset.
    """

    block_size: int
    slots: torch.Tensor
    rows: tuple[Rows, ...]

    @classmethod
    def of(cls, work: Sequence[Work], block_size: int, device: torch.device) -> "PagedBatch":
        """Lay out the work of a plan: all decoding sequences together, every prompt by itself."""
        slots: list[int] = []
        decoding: list[tuple[int, Work]] = []
        prompts: list[tuple[int, Work]] = []
        for item in work:
            (decoding if len(item.token_ids) == 1 else prompts).append((len(slots), item))
            slots += _slots(item, block_size)
        groups = ([decoding] if decoding else []) + [[prompt] for prompt in prompts]
        rows = tuple(_rows(group, device) for group in groups)
        return cls(block_size, torch.tensor(slots, dtype=torch.int64, device=device), rows)


class AttentionBackend(Protocol):
    """Writes K and V into blocks, attends to them through block tables, copies blocks within and between tiers.

    The order of elements inside a (block, layer) is the backend's own.
    """

    def block_shape(self) -> tuple[int, ...]:
        """Return the shape of one layer's K (or V) in one block."""

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, batch: PagedBatch) -> None:
        """Store `[tokens, kv_heads, head_size]` K and V of one layer at the batch's slots."""

    def attend(self, layer: int, query: torch.Tensor, batch: PagedBatch, scoring: Scoring) -> torch.Tensor:
        """Attend causally with `[tokens, heads, head_size]` queries; return the same shape.

        K and V of the fed tokens must have been written. Query head h reads KV head h // (heads / kv_heads).
        """

    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        """Copy whole blocks, all layers; no destination is a source."""

    def swap(self, copies: Sequence[Copy], direction: Direction) -> None:
        """Copy whole blocks, all layers, byte for byte to the other tier; no block is a destination twice.

        There must be a host tier. On a GPU the copies are queued on the current stream.
        """


def _slots(work: Work, block_size: int) -> list[int]:
    return [
        work.block_table[position // block_size] * block_size + position % block_size
        for position in range(work.start, work.end)
    ]


def _rows(group: list[tuple[int, Work]], device: torch.device) -> Rows:
    fed = len(group[0][1].token_ids)
    widest = max(len(work.block_table) for _, work in group)
    tables = [[*work.block_table, *[0] * (widest - len(work.block_table))] for _, work in group]
    tokens = [list(range(first, first + fed)) for first, _ in group]
    ends = [work.end for _, work in group]
    return Rows(*(torch.tensor(column, dtype=torch.int64, device=device) for column in (tokens, tables, ends)))
