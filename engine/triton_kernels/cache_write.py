"""Writes K and V to their slots, both in one launch."""

import torch
import triton
import triton.language as tl

from engine.triton_kernels.paged_layer import PagedLayer
from engine.triton_kernels.tuning import Tuning


def write_cache(key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, layer: PagedLayer, tuning: Tuning) -> None:
    """Write `[tokens, kv_heads, head_size]` K and V of the cache's dtype at `slots`, `[tokens]` int64.

    A slot is block id * block_size + offset. Tokens with negative slots are padding and are not written. The elements
    of a head are contiguous; tokens and heads may have any stride.
    """
    tokens, kv_heads, size = key.shape
    _write[(-(-tokens // tuning.write_tokens),)](
        key,
        value,
        slots,
        layer.memory,
        tokens,
        layer.number,
        *key.stride()[:2],
        *value.stride()[:2],
        *layer.strides,
        BLOCK_SIZE=layer.block_size,
        HEAD_SIZE=size,
        KV_HEADS=kv_heads,
        TOKENS=tuning.write_tokens,
        ELEMENTS=triton.next_power_of_2(kv_heads * size),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["tokens", "layer"])
def _write(
    key,
    value,
    slots,
    cache,
    tokens,
    layer,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    block_stride,
    layer_stride,
    value_offset,
    BLOCK_SIZE: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Write a few tokens, all heads."""
    numbers = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    elements = tl.arange(0, ELEMENTS)
    heads = elements // HEAD_SIZE
    dims = elements % HEAD_SIZE
    slot = tl.load(slots + numbers, mask=numbers < tokens, other=-1)
    there = (slot >= 0)[:, None] & (heads < KV_HEADS)[None, :]
    rows = slot // BLOCK_SIZE * block_stride + layer.to(tl.int64) * layer_stride + slot % BLOCK_SIZE * HEAD_SIZE
    places = cache + rows[:, None] + (heads * (BLOCK_SIZE * HEAD_SIZE) + dims)[None, :]
    sources = numbers[:, None] * key_token_stride + (heads * key_head_stride + dims)[None, :]
    tl.store(places, tl.load(key + sources, mask=there, other=0), mask=there)
    sources = numbers[:, None] * value_token_stride + (heads * value_head_stride + dims)[None, :]
    tl.store(places + value_offset, tl.load(value + sources, mask=there, other=0), mask=there)
