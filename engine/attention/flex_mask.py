"""The blocks of the pool that a row of queries reads, in the form of FlexAttention's kernels.

A kernel visits lists of blocks: *full* blocks, where each query of the row sees each slot, and *partial* blocks, where
the mask decides for each slot. Partial are the blocks in which the row's own tokens end, and those that a window cuts.
"""

from itertools import pairwise
from typing import NamedTuple

import torch

from engine.attention.backend import PagedBatch

# torch would compile a separate graph for a batch of one row.
_MIN_ROWS = 2


class QueryRows(NamedTuple):
    """Fed tokens in rows of equal length, each of one sequence, padded by repeating the last token.

    `tokens`: `[rows, length]` indices in the batch. `sequences`: `[rows]` sequence of each row. `first`, `last`:
    `[rows]` positions of the row's first and last token in its sequence; a padding row has first 0 and last -1.
    `places`: `[fed]` indices in the flattened rows of the tokens `fed`, `[fed]` indices in the batch. All int64.
    """

    tokens: torch.Tensor
    sequences: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor
    places: torch.Tensor
    fed: torch.Tensor


class BlockLists(NamedTuple):
    """Indices in the block tables that each row reads: `[rows]` counts and `[rows, blocks]` indices.

    Only the first indices of a row, as many as its count, are valid.
    """

    full_counts: torch.Tensor
    full: torch.Tensor
    partial_counts: torch.Tensor
    partial: torch.Tensor


def query_rows(batch: PagedBatch, length: int) -> tuple[QueryRows, ...]:
    """Arrange decoding sequences in rows of one token, and prompts in rows of `length` tokens."""
    first, ends = batch.first.tolist(), batch.ends.tolist()
    decoding: list[_Piece] = []
    prompts: list[_Piece] = []
    for number, (begin, end) in enumerate(pairwise(first)):
        start = ends[number] - (end - begin)
        pieces = [
            _Piece(number, begin + offset, start + offset, min(length, end - begin - offset))
            for offset in range(0, end - begin, length)
        ]
        (decoding if end - begin == 1 else prompts).extend(pieces)
    device = batch.slots.device
    return tuple(_rows(pieces, size, device) for pieces, size in ((decoding, 1), (prompts, length)) if pieces)


class _Piece(NamedTuple):
    sequence: int
    begin: int  # place in the batch
    position: int  # of the first token, in its sequence
    tokens: int


def _rows(pieces: list[_Piece], length: int, device: torch.device) -> QueryRows:
    padding = [_Piece(0, 0, 0, 0)] * (_MIN_ROWS - len(pieces))
    sequences, begin, position, counts = torch.tensor([*pieces, *padding]).unbind(1)
    steps = torch.arange(length)
    tokens = begin[:, None] + torch.minimum(steps, (counts[:, None] - 1).clamp(min=0))
    real = steps < counts[:, None]
    columns = (tokens, sequences, position, position + counts - 1, real.flatten().nonzero()[:, 0], tokens[real])
    return QueryRows(*(column.to(device) for column in columns))


def block_lists(
    first: torch.Tensor, last: torch.Tensor, window: int, block_size: int, width: int, columns: int | None = None
) -> BlockLists:
    """Split the visible blocks into full and partial ones. `width`: blocks of a table.

    Full blocks are consecutive, from `begin` to `end`. Partial ones precede and follow them. The lists have room for at
    most `columns` blocks, which are all that can be visible; by default for a whole table.
    """
    lowest = (first - window + 1).clamp(min=0) // block_size
    beyond = last // block_size + 1
    begin = torch.minimum(torch.maximum(-((window - 1 - last) // block_size), lowest), beyond)
    end = torch.minimum(torch.maximum((first + 1) // block_size, begin), beyond)
    steps = torch.arange(width if columns is None else min(width, columns), device=first.device)
    full = begin[:, None] + steps
    partial = lowest[:, None] + steps
    partial = partial + (end - begin)[:, None] * (partial >= begin[:, None])
    counts = beyond - lowest - (end - begin)
    limit = max(width - 1, 0)
    return BlockLists(end - begin, full.clamp(max=limit), counts.clamp(min=0), partial.clamp(max=limit))
