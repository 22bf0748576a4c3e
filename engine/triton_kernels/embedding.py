"""Embeddings of a part of the vocabulary: a rank has the rows of some tokens."""

import torch
import triton
import triton.language as tl

from engine.triton_kernels.tuning import INTERPRETED

_ELEMENTS = 1 << 16 if INTERPRETED else 2048  # of one program


def embed_part(embedding: torch.Tensor, begin: int, token_ids: torch.Tensor, output: torch.Tensor) -> None:
    """Write `embedding[token - begin]` of each token, and zeros for tokens without a row.

    `embedding`: `[rows, hidden]`. `token_ids`: `[tokens]` int64. `output`: `[tokens, hidden]`. All contiguous.
    """
    tokens, hidden = output.shape
    elements = min(_ELEMENTS, triton.next_power_of_2(hidden))
    if tokens:
        _embed_part[(tokens, triton.cdiv(hidden, elements))](
            embedding, token_ids, output, begin, len(embedding), HIDDEN=hidden, ELEMENTS=elements, num_warps=4
        )


@triton.jit(do_not_specialize=["begin", "rows"])
def _embed_part(embedding, token_ids, output, begin, rows, HIDDEN: tl.constexpr, ELEMENTS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * ELEMENTS + tl.arange(0, ELEMENTS)
    row = tl.load(token_ids + token) - begin
    there = element < HIDDEN
    ours = (row >= 0) & (row < rows)
    found = tl.load(embedding + row * HIDDEN + element, mask=there & ours, other=0)
    tl.store(output + token * HIDDEN + element, found, mask=there)
