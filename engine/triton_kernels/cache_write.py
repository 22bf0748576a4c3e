"""Writes K and V to their slots, both in one launch."""

import torch
import triton
import triton.language as tl

from engine.triton_kernels.paged_layer import PagedLayer
from engine.triton_kernels.tuning import Tuning


def write_cache(key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, layer: PagedLayer, tuning: Tuning) -> None:
    """Write `[tokens, kv_heads, key_size]` K and V of `value_size` at `slots`, `[tokens]` int64.

    Both have the cache's dtype. A slot is block id * block_size + offset. Tokens with negative slots are padding and
    are not written. The elements of a head are contiguous; tokens and heads may have any stride.
    """
    tokens, kv_heads = key.shape[:2]
    _write[(-(-tokens // tuning.write_tokens),)](
        key,
        value,
        slots,
        layer.memory,
        tokens,
        *key.stride()[:2],
        *value.stride()[:2],
        *layer.distances,
        BLOCK_SIZE=layer.block_size,
        KEY_SIZE=layer.key_size,
        VALUE_SIZE=layer.value_size,
        KV_HEADS=kv_heads,
        TOKENS=tuning.write_tokens,
        KEY_ELEMENTS=triton.next_power_of_2(kv_heads * layer.key_size),
        VALUE_ELEMENTS=triton.next_power_of_2(kv_heads * layer.value_size),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["tokens"])
def _write(
    key,
    value,
    slots,
    cache,
    tokens,
    key_token_stride,
    key_head_stride,
    value_token_stride,
    value_head_stride,
    block_stride,
    key_offset,
    value_distance,
    BLOCK_SIZE: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    KEY_ELEMENTS: tl.constexpr,
    VALUE_ELEMENTS: tl.constexpr,
):
    """Write a few tokens, all heads."""
    numbers = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slots + numbers, mask=numbers < tokens, other=-1)
    _copy_heads(
        key, cache + key_offset, numbers, slot, key_token_stride, key_head_stride, block_stride,
        BLOCK_SIZE, KEY_SIZE, KV_HEADS, KEY_ELEMENTS,
    )  # fmt: skip
    _copy_heads(
        value, cache + key_offset + value_distance, numbers, slot, value_token_stride, value_head_stride, block_stride,
        BLOCK_SIZE, VALUE_SIZE, KV_HEADS, VALUE_ELEMENTS,
    )  # fmt: skip


@triton.jit
def _copy_heads(
    source,
    target,
    numbers,
    slot,
    token_stride,
    head_stride,
    block_stride,
    BLOCK_SIZE: tl.constexpr,
    SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    ELEMENTS: tl.constexpr,
):
    """Copy K or V of the tokens `numbers`, `[TOKENS]`, to their slots. `target` is that of the layer in block 0."""
    elements = tl.arange(0, ELEMENTS)
    heads = elements // SIZE
    dims = elements % SIZE
    there = (slot >= 0)[:, None] & (heads < KV_HEADS)[None, :]
    sources = numbers[:, None] * token_stride + (heads * head_stride + dims)[None, :]
    rows = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * SIZE
    places = target + rows[:, None] + (heads * (BLOCK_SIZE * SIZE) + dims)[None, :]
    tl.store(places, tl.load(source + sources, mask=there, other=0), mask=there)
