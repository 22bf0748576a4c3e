"""Copies whole blocks within a cache, all pairs in one launch."""

import torch
import triton
import triton.language as tl

from engine.triton_kernels.tuning import Tuning

_WORDS = (torch.int64, torch.int32, torch.int16, torch.int8)


def copy_blocks(cache: torch.Tensor, pairs: torch.Tensor, tuning: Tuning) -> None:
    """Copy block `pairs[i, 0]` of a contiguous cache to block `pairs[i, 1]`, byte for byte; no block is both.

    `pairs`: `[copies, 2]` int64.
    """
    memory = _as_words(cache)
    words = memory.shape[1]
    _copy[(len(pairs), -(-words // tuning.copy_words))](memory, pairs, words, WORDS=tuning.copy_words, num_warps=4)


def _as_words(cache: torch.Tensor) -> torch.Tensor:
    """Return the cache as `[blocks, words]` of the largest words that divide a block; two are loaded at once."""
    rows = cache.view(len(cache), -1)
    size = rows.shape[1] * rows.itemsize
    return rows.view(next(word for word in _WORDS if size % word.itemsize == 0))


@triton.jit
def _copy(memory, pairs, words, WORDS: tl.constexpr):
    """Copy a part of one block."""
    pair = pairs + tl.program_id(0) * 2
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    source = memory + tl.load(pair) * words + word
    target = memory + tl.load(pair + 1) * words + word
    tl.store(target, tl.load(source, mask=word < words, other=0), mask=word < words)
