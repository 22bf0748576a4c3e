"""Copies whole blocks within a cache or between the tiers, all pairs in one launch."""

import torch
import triton
import triton.language as tl

from engine.triton_kernels.tuning import Tuning

_WORDS = (torch.int64, torch.int32, torch.int16, torch.int8)
# Of a copy between the tiers, by all programs together: 256 KiB in flight.
_SWAPPED_WORDS = 1 << 15
_WARP_WORDS = 512


def copy_blocks(cache: torch.Tensor, pairs: torch.Tensor, tuning: Tuning) -> None:
    """Copy block `pairs[i, 0]` of a contiguous cache to block `pairs[i, 1]`, byte for byte; no block is both.

    `pairs`: `[copies, 2]` int64.
    """
    words = _as_words(cache)
    _launch(words, words, pairs, tuning.copy_words, most_programs=None)


def swap_blocks(source: torch.Tensor, target: torch.Tensor, pairs: torch.Tensor, tuning: Tuning) -> None:
    """Copy block `pairs[i, 0]` of one tier to block `pairs[i, 1]` of the other, byte for byte.

    The caches are contiguous; that of the host is pinned, so that the kernel reaches it by its address. `pairs`:
    `[copies, 2]` int64 on the device; destinations are distinct.
    """
    read, written = _as_words(source), _as_words(target)
    each = min(_SWAPPED_WORDS // tuning.swap_programs, triton.next_power_of_2(read.shape[1]))
    _launch(read, written, pairs, each, most_programs=_SWAPPED_WORDS // each)


def _launch(
    read: torch.Tensor, written: torch.Tensor, pairs: torch.Tensor, each: int, most_programs: int | None
) -> None:
    """Copy `each` words at a time by every program."""
    words = read.shape[1]
    parts = -(-words // each)
    pieces = len(pairs) * parts
    programs = min(pieces, most_programs or pieces)
    warps = min(32, max(1, each // _WARP_WORDS))
    _copy[(programs,)](read, written, pairs, words, parts, pieces, WORDS=each, num_warps=warps)


def _as_words(cache: torch.Tensor) -> torch.Tensor:
    """Return the cache as `[blocks, words]` of the largest words that divide a block; two are loaded at once."""
    rows = cache.view(len(cache), -1)
    size = rows.shape[1] * rows.itemsize
    return rows.view(next(word for word in _WORDS if size % word.itemsize == 0))


@triton.jit(do_not_specialize=["parts", "pieces"])
def _copy(source, target, pairs, words, parts, pieces, WORDS: tl.constexpr):
    """Copy every `programs`-th part of a block."""
    for piece in tl.range(tl.program_id(0), pieces, tl.num_programs(0)):
        pair = pairs + piece // parts * 2
        word = piece % parts * WORDS + tl.arange(0, WORDS)
        there = word < words
        # Read once, so it should not displace what computation has in L2.
        content = tl.load(source + tl.load(pair) * words + word, mask=there, other=0, eviction_policy="evict_first")
        tl.store(target + tl.load(pair + 1) * words + word, content, mask=there)
