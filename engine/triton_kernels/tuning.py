"""Tile sizes of the kernels. Chosen without autotuning, because a captured graph keeps one binary."""

from dataclasses import dataclass, replace

import torch
import triton

# Whether kernels run on the CPU under Triton's interpreter. Triton decides this at import.
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)

_MIN_ROWS = 16  # of a matrix product on tensor cores


@dataclass(frozen=True)
class Tiling:
    """Tile sizes of one attention kernel: query rows, keys, warps of a program, and pipelined loads (stages)."""

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tuning:
    """Tile sizes and launch sizes for one kind of cache on one device.

    `programs` run concurrently; decoding splits sequences into about `waves` items for each program, none shorter than
    `min_chunk` keys. One program writes `write_tokens` tokens to the cache, or copies `copy_words` words.
    """

    decode: Tiling
    prefill: Tiling
    programs: int
    waves: int
    min_chunk: int
    write_tokens: int
    copy_words: int

    @property
    def pieces(self) -> int:
        """Approximate number of items that decoding is split into."""
        return self.programs * self.waves


# Tiles of decoding and of prefill for 16-bit types, by padded head size; smaller and larger heads use the nearest. Rows
# are minimums. K and V being loaded must fit into shared memory. Of the stages of decoding, block ids take two and the
# softmax one, so five keep two tiles of K and V. `make gpu-check` measures others and prints these lines.
TILES = {
    64: (Tiling(16, 128, 4, 5), Tiling(128, 64, 4, 3)),
    128: (Tiling(16, 64, 4, 5), Tiling(128, 64, 8, 3)),
    256: (Tiling(16, 32, 4, 5), Tiling(64, 32, 8, 2)),
}
PROGRAMS_PER_PROCESSOR, WAVES, MIN_CHUNK = 2, 2, 256


def tuning_for(head_size: int, dtype: torch.dtype, group: int, device: torch.device) -> Tuning:
    """Return the tuning for heads of this size, of which `group` query heads share K and V."""
    rows = padded(group, _MIN_ROWS)
    if INTERPRETED:
        return Tuning(Tiling(rows, 128, 4, 1), Tiling(max(rows, 128), 256, 4, 1), 4, 1, 128, 1024, 1 << 16)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    decode, prefill = _tilings(padded(head_size), dtype, rows)
    return Tuning(decode, prefill, PROGRAMS_PER_PROCESSOR * processors, WAVES, MIN_CHUNK, 1, 1 << 11)


def padded(size: int, least: int = 16) -> int:
    """Return the next power of two, and at least the minimum of a matrix product."""
    return max(least, 1 << (size - 1).bit_length())


def _tilings(dims: int, dtype: torch.dtype, rows: int) -> tuple[Tiling, Tiling]:
    """Choose tiles for heads of padded size `dims`, with at least `rows` rows in a tile.

    float32 has no lossless tensor cores; its tiles stay small.
    """
    if dtype == torch.float32:
        keys, warps = (32, 4) if dims <= 64 else (16, 8)
        return Tiling(rows, keys, warps, 2), Tiling(max(rows, 32 if dims <= 128 else 16), keys, warps, 2)
    decode, prefill = TILES[min(max(dims, min(TILES)), max(TILES))]
    warps = decode.warps if rows <= 32 else max(decode.warps, 8)
    return replace(decode, rows=rows, warps=warps), replace(prefill, rows=max(rows, prefill.rows))
