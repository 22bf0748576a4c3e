"""How large the kernels' tiles are. Decided beforehand: a recorded graph keeps one binary, so nothing is tried out."""

from dataclasses import dataclass

import torch
import triton

# Whether kernels run on the CPU, under Triton's interpreter. Triton decides that when it is imported.
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)

_LEAST_ROWS = 16  # of a matrix product on tensor cores


@dataclass(frozen=True)
class Tiling:
    """The tiles of one attention kernel: rows of queries, keys, warps of a program, loads under way at once."""

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tuning:
    """The choices for one kind of cache on one device.

    `programs` run at a time; decoding cuts sequences so that each of them has about `waves` pieces of work, none
    shorter than `least_chunk` keys. `write_tokens` are written to the cache by one program, `copy_words` copied by one.
    """

    decode: Tiling
    prefill: Tiling
    programs: int
    waves: int
    least_chunk: int
    write_tokens: int
    copy_words: int

    @property
    def pieces(self) -> int:
        """Pieces of work that decoding is cut into, about."""
        return self.programs * self.waves


def tuning_for(head_size: int, dtype: torch.dtype, group: int, device: torch.device) -> Tuning:
    """Return the choices for heads of this size, of which `group` query heads share K and V."""
    rows = padded(group, _LEAST_ROWS)
    if INTERPRETED:
        return Tuning(Tiling(rows, 128, 4, 1), Tiling(max(rows, 128), 256, 4, 1), 4, 1, 128, 1024, 1 << 16)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    decode, prefill = _tilings(padded(head_size), dtype, rows)
    return Tuning(decode, prefill, 2 * processors, 2, 256, 1, 1 << 11)


def padded(size: int, least: int = 16) -> int:
    """Return the power of two that has room for a size, and is enough for a matrix product."""
    return max(least, 1 << (size - 1).bit_length())


def _tilings(dims: int, dtype: torch.dtype, rows: int) -> tuple[Tiling, Tiling]:
    """Decide for heads of padded size `dims`, of which at least `rows` are in a tile.

    K and V under way must fit into shared memory. Of the stages of decoding, the block ids take two and the weights'
    softmax another: five keep two tiles of K and V. float32 has no tensor cores without loss; its tiles stay small.
    """
    if dtype == torch.float32:
        keys, warps = (32, 4) if dims <= 64 else (16, 8)
        return Tiling(rows, keys, warps, 2), Tiling(max(rows, 32 if dims <= 128 else 16), keys, warps, 2)
    warps = 4 if rows <= 32 else 8
    if dims <= 64:
        return Tiling(rows, 128, warps, 5), Tiling(max(rows, 128), 64, 4, 3)
    if dims == 128:
        return Tiling(rows, 64, warps, 5), Tiling(max(rows, 128), 64, 8, 3)
    return Tiling(rows, 32, warps, 5), Tiling(max(rows, 64), 32, 8, 2)
