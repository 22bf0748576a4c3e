"""What Llama-shaped layers do between their projections and attention, in one launch: rotate Q and K, write K and V."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.triton_kernels.paged_layer import PagedLayer
from engine.triton_kernels.rounding import rounded, widened
from engine.triton_kernels.tuning import INTERPRETED


class TableRows(NamedTuple):
    """Says where tokens go by their positions, all int32: `[tokens]` rows of `[rows, blocks]` tables of block ids."""

    rows: torch.Tensor
    tables: torch.Tensor


def write_rotated(
    projected: torch.Tensor,
    positions: torch.Tensor,
    rotations: torch.Tensor,
    query: torch.Tensor,
    layer: PagedLayer,
    places: torch.Tensor | TableRows,
) -> None:
    """Rotate Q into `query`, and write rotated K, and V, to the cache.

    `projected`: `[tokens, (heads + 2 * kv_heads) * head_size]` Q, K and V. `positions`: `[tokens]`. `rotations`:
    `[positions, head_size]`, the cosines and then the sines of the angles by which the elements i and i + head_size / 2
    of a head are turned. `query`: contiguous `[tokens, heads, head_size]`. `places`: `[tokens]` int64 slots, or what
    they are computed from. Tokens with a negative position or slot are padding: nothing is written for them.
    """
    tokens, heads, size = query.shape
    group = heads // layer.kv_heads
    given = isinstance(places, torch.Tensor)
    slots, rows, tables = (places, None, None) if isinstance(places, torch.Tensor) else (None, *places)
    _write_rotated[(tokens, layer.kv_heads)](
        projected,
        positions,
        rotations,
        query,
        layer.memory,
        slots,
        rows,
        tables,
        layer.number,
        projected.stride(0),
        rotations.stride(0),
        0 if tables is None else tables.stride(0),
        *layer.strides,
        GIVEN=given,
        KV_HEADS=layer.kv_heads,
        GROUP=group,
        BLOCK_SIZE=layer.block_size,
        HEAD_SIZE=size,
        ROWS=triton.next_power_of_2(group),
        DIMS=triton.next_power_of_2(size),
        HALF_DIMS=triton.next_power_of_2(size // 2),
        INTERPRETED=INTERPRETED,
        num_warps=2,
    )


@triton.jit(do_not_specialize=["layer", "table_stride"])
def _write_rotated(
    projected,
    positions,
    rotations,
    query,
    cache,
    slots,
    rows,
    tables,
    layer,
    projected_stride,
    rotation_stride,
    table_stride,
    block_stride,
    layer_stride,
    value_offset,
    GIVEN: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    HALF_DIMS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Do one token's part of one KV head and its query heads."""
    HALF: tl.constexpr = HEAD_SIZE // 2
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    position = tl.load(positions + token).to(tl.int64)
    if GIVEN:
        slot = tl.load(slots + token)
    else:
        row = tl.load(rows + token).to(tl.int64)
        known = position >= 0
        block = tl.load(tables + row * table_stride + position // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
        slot = block * BLOCK_SIZE + position % BLOCK_SIZE
    if (position >= 0) & (slot >= 0):
        half = tl.arange(0, HALF_DIMS)
        halved = half < HALF
        cosines = tl.load(rotations + position * rotation_stride + half, mask=halved, other=0)
        sines = tl.load(rotations + position * rotation_stride + HALF + half, mask=halved, other=0)
        cosines = widened(cosines, INTERPRETED).to(tl.float32)
        sines = widened(sines, INTERPRETED).to(tl.float32)

        heads = kv_head * GROUP + tl.arange(0, ROWS)
        there = (tl.arange(0, ROWS) < GROUP)[:, None] & halved[None, :]
        sources = projected + token * projected_stride + heads[:, None] * HEAD_SIZE + half[None, :]
        left = widened(tl.load(sources, mask=there, other=0), INTERPRETED).to(tl.float32)
        right = widened(tl.load(sources + HALF, mask=there, other=0), INTERPRETED).to(tl.float32)
        turned_left = left * cosines[None, :] - right * sines[None, :]
        turned_right = right * cosines[None, :] + left * sines[None, :]
        targets = query + (token * (KV_HEADS * GROUP) + heads[:, None]) * HEAD_SIZE + half[None, :]
        tl.store(targets, rounded(turned_left, query.dtype.element_ty, INTERPRETED), mask=there)
        tl.store(targets + HALF, rounded(turned_right, query.dtype.element_ty, INTERPRETED), mask=there)

        source = projected + token * projected_stride + (KV_HEADS * GROUP + kv_head) * HEAD_SIZE
        target = cache + slot // BLOCK_SIZE * block_stride + layer.to(tl.int64) * layer_stride
        target += kv_head * (BLOCK_SIZE * HEAD_SIZE) + slot % BLOCK_SIZE * HEAD_SIZE
        key_left = widened(tl.load(source + half, mask=halved, other=0), INTERPRETED).to(tl.float32)
        key_right = widened(tl.load(source + HALF + half, mask=halved, other=0), INTERPRETED).to(tl.float32)
        turned_key_left = key_left * cosines - key_right * sines
        turned_key_right = key_right * cosines + key_left * sines
        tl.store(target + half, rounded(turned_key_left, cache.dtype.element_ty, INTERPRETED), mask=halved)
        tl.store(target + HALF + half, rounded(turned_key_right, cache.dtype.element_ty, INTERPRETED), mask=halved)

        dims = tl.arange(0, DIMS)
        value = tl.load(source + KV_HEADS * HEAD_SIZE + dims, mask=dims < HEAD_SIZE, other=0)
        tl.store(target + value_offset + dims, value, mask=dims < HEAD_SIZE)
