"""Tile sizes of the kernels. Chosen without autotuning, because a captured graph keeps one binary."""

from dataclasses import dataclass, replace

import torch
import triton

# Whether kernels run on the CPU under Triton's interpreter. Triton decides this at import.
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)

_MIN_ROWS = 16  # of a matrix product on tensor cores
MAX_HEAD_SIZE = 512  # with larger heads, the smallest tiles of K and V exceed shared memory


@dataclass(frozen=True)
class Tiling:
    """Tile sizes of one attention kernel: query rows, keys, warps of a program, and pipelined loads (stages)."""

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tuning:
    """Tile sizes and launch sizes for one kind of layer on one device, which has this number of processors.

    `programs` of decoding run concurrently; decoding splits sequences into about `waves` items for each of them, none
    shorter than `min_chunk` keys. One program writes `write_tokens` tokens to the cache, or copies `copy_words` words;
    `swap_programs` copy large blocks between the tiers.
    """

    decode: Tiling
    prefill: Tiling
    processors: int
    programs: int
    waves: int
    min_chunk: int
    write_tokens: int
    copy_words: int
    swap_programs: int

    @property
    def pieces(self) -> int:
        """Approximate number of items that decoding is split into."""
        return self.programs * self.waves

    @property
    def prefill_programs(self) -> int:
        """Return how many programs of prefill run concurrently: their registers let a processor hold 8 warps."""
        return self.processors * max(1, _PREFILL_WARPS // self.prefill.warps)


Tiles = dict[int, tuple[Tiling, Tiling]]

# Tiles of decoding and of prefill for 16-bit types, by padded head size; smaller and larger heads use the nearest. Rows
# are minimums. K and V being loaded must fit into shared memory. Of the stages, block ids take two and the softmax one:
# five keep the next tile of K and V in flight while one is multiplied. With two to four, each tile is awaited at once.
# Prefill spills no registers. `make gpu-check` measures others and prints these lines.
TILES: Tiles = {
    64: (Tiling(16, 128, 4, 5), Tiling(128, 64, 8, 5)),
    128: (Tiling(16, 64, 4, 5), Tiling(128, 64, 8, 5)),
    256: (Tiling(16, 32, 4, 5), Tiling(64, 32, 8, 5)),
    512: (Tiling(16, 16, 4, 5), Tiling(32, 16, 8, 5)),
}
# For compute capabilities other than 9.0 and 10.x. Products take the query from registers, which (128, 64, 8, 5) would
# spill, and a program of 8.6, 8.9 and 12.0 has 99 KiB of shared memory.
SMALL_TILES: Tiles = {
    64: (Tiling(16, 128, 4, 5), Tiling(128, 64, 8, 5)),
    128: (Tiling(16, 64, 4, 5), Tiling(128, 32, 8, 5)),
    256: (Tiling(16, 32, 4, 5), Tiling(64, 16, 8, 5)),
    512: (Tiling(16, 16, 4, 5), Tiling(32, 16, 8, 5)),
}
PROGRAMS_PER_PROCESSOR, WAVES, MIN_CHUNK = 2, 2, 256
# Of a copy between the tiers, which the bus limits: whatever their number, they have 256 KiB in flight together. Few
# programs with many warps leave most processors whole to products, whose programs need all registers of one.
SWAP_PROGRAMS = 4
_LARGE = (9, 10)  # major compute capabilities for which TILES are
_PREFILL_WARPS = 8


def tuning_for(head_size: int, dtype: torch.dtype, group: int, device: torch.device) -> Tuning:
    """Return the tuning for heads of this size, the larger of K and V, which `group` query heads share."""
    rows = padded(group, _MIN_ROWS)
    if INTERPRETED:
        tiles = Tiling(rows, 128, 4, 1), Tiling(max(rows, 128), 256, 4, 1)
        return Tuning(*tiles, 2, 4, 1, 128, 1024, 1 << 16, SWAP_PROGRAMS)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    decode, prefill = _tilings(padded(head_size), dtype, rows, tiles_of(device))
    programs = PROGRAMS_PER_PROCESSOR * processors
    return Tuning(decode, prefill, processors, programs, WAVES, MIN_CHUNK, 1, 1 << 11, SWAP_PROGRAMS)


def tiles_of(device: torch.device) -> Tiles:
    """Return the table for this device."""
    large = INTERPRETED or torch.cuda.get_device_properties(device).major in _LARGE
    return TILES if large else SMALL_TILES


def padded(size: int, least: int = 16) -> int:
    """Return the next power of two, and at least the minimum of a matrix product."""
    return max(least, 1 << (size - 1).bit_length())


def merge_warps(value_dims: int) -> int:
    """Return the warps of a program that merges 16 rows of padded V, whose sums are in registers."""
    return max(2, value_dims // 128)


def _tilings(dims: int, dtype: torch.dtype, rows: int, tiles: Tiles) -> tuple[Tiling, Tiling]:
    """Choose tiles for heads of padded size `dims`, with at least `rows` rows in a tile.

    float32 has no lossless tensor cores; its tiles stay small.
    """
    if dtype == torch.float32:
        keys, warps = (32, 4) if dims <= 64 else (16, 8)
        return Tiling(rows, keys, warps, 5), Tiling(max(rows, 32 if dims <= 128 else 16), keys, 8, 5)
    decode, prefill = tiles[min(max(dims, min(tiles)), max(tiles))]
    warps = decode.warps if rows <= 32 else max(decode.warps, 8)
    return replace(decode, rows=rows, warps=warps), replace(prefill, rows=max(rows, prefill.rows))
