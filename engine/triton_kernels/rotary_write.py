"""The operations of Llama-shaped layers between projections and attention, in one launch.

Q and K are normalized if the layer does so (Qwen3), and rotated (RoFormer; Su et al., 2021); K and V are written to
their slots.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.triton_kernels.paged_layer import PagedLayer
from engine.triton_kernels.rounding import rounded, widened
from engine.triton_kernels.tuning import INTERPRETED


class HeadNorms(NamedTuple):
    """Weights of the RMS norms of each head of Q and of K, `[head_size]`, and their epsilon."""

    query: torch.Tensor
    key: torch.Tensor
    epsilon: float


def write_rotated(
    projected: torch.Tensor,
    positions: torch.Tensor,
    rotations: torch.Tensor,
    query: torch.Tensor,
    layer: PagedLayer,
    slots: torch.Tensor,
    norms: HeadNorms | None = None,
) -> None:
    """Rotate Q into `query`, and write rotated K, and V, to the cache.

    `projected`: `[tokens, (heads + 2 * kv_heads) * head_size]` Q, K and V. `positions`: `[tokens]`. `rotations`:
    `[positions, head_size]`, cosines and then sines of the angles that rotate the elements i and i + head_size / 2 of a
    head. `query`: contiguous `[tokens, heads, head_size]`. `slots`: `[tokens]` int64. Tokens with a negative position
    or slot are padding and are not written. K and V of the layer have the same size.
    """
    tokens, heads, size = query.shape
    assert layer.key_size == layer.value_size == size, "the kernel has one head size"
    group = heads // layer.kv_heads
    _write_rotated[(tokens, layer.kv_heads)](
        projected,
        positions,
        rotations,
        query,
        layer.memory,
        slots,
        None if norms is None else norms.query,
        None if norms is None else norms.key,
        0.0 if norms is None else norms.epsilon,
        projected.stride(0),
        rotations.stride(0),
        *layer.distances,
        NORMED=norms is not None,
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


@triton.jit
def _write_rotated(
    projected,
    positions,
    rotations,
    query,
    cache,
    slots,
    query_norm,
    key_norm,
    epsilon,
    projected_stride,
    rotation_stride,
    block_stride,
    key_offset,
    value_distance,
    NORMED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
    HALF_DIMS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Process one token for one KV head and its query heads."""
    HALF: tl.constexpr = HEAD_SIZE // 2
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    position = tl.load(positions + token).to(tl.int64)
    slot = tl.load(slots + token)
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
        if NORMED:
            factors = tl.rsqrt((tl.sum(left * left, 1) + tl.sum(right * right, 1)) / HEAD_SIZE + epsilon)[:, None]
            weights = widened(tl.load(query_norm + half, mask=halved, other=0), INTERPRETED).to(tl.float32)
            left = left * factors * weights[None, :]
            weights = widened(tl.load(query_norm + HALF + half, mask=halved, other=0), INTERPRETED).to(tl.float32)
            right = right * factors * weights[None, :]
        turned_left = left * cosines[None, :] - right * sines[None, :]
        turned_right = right * cosines[None, :] + left * sines[None, :]
        targets = query + (token * (KV_HEADS * GROUP) + heads[:, None]) * HEAD_SIZE + half[None, :]
        tl.store(targets, rounded(turned_left, query.dtype.element_ty, INTERPRETED), mask=there)
        tl.store(targets + HALF, rounded(turned_right, query.dtype.element_ty, INTERPRETED), mask=there)

        source = projected + token * projected_stride + (KV_HEADS * GROUP + kv_head) * HEAD_SIZE
        target = cache + slot // BLOCK_SIZE * block_stride + key_offset
        target += kv_head * (BLOCK_SIZE * HEAD_SIZE) + slot % BLOCK_SIZE * HEAD_SIZE
        key_left = widened(tl.load(source + half, mask=halved, other=0), INTERPRETED).to(tl.float32)
        key_right = widened(tl.load(source + HALF + half, mask=halved, other=0), INTERPRETED).to(tl.float32)
        if NORMED:
            factor = tl.rsqrt((tl.sum(key_left * key_left, 0) + tl.sum(key_right * key_right, 0)) / HEAD_SIZE + epsilon)
            weights = widened(tl.load(key_norm + half, mask=halved, other=0), INTERPRETED).to(tl.float32)
            key_left = key_left * factor * weights
            weights = widened(tl.load(key_norm + HALF + half, mask=halved, other=0), INTERPRETED).to(tl.float32)
            key_right = key_right * factor * weights
        turned_key_left = key_left * cosines - key_right * sines
        turned_key_right = key_right * cosines + key_left * sines
        tl.store(target + half, rounded(turned_key_left, cache.dtype.element_ty, INTERPRETED), mask=halved)
        tl.store(target + HALF + half, rounded(turned_key_right, cache.dtype.element_ty, INTERPRETED), mask=halved)

        dims = tl.arange(0, DIMS)
        value = tl.load(source + KV_HEADS * HEAD_SIZE + dims, mask=dims < HEAD_SIZE, other=0)
        tl.store(target + value_distance + dims, value, mask=dims < HEAD_SIZE)
