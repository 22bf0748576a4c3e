"""Compiled graphs of FlexAttention: what is compiled, for which shapes, and where it is unavailable."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.nn.attention import flex_attention as flex
from torch.utils._triton import has_triton

from engine.attention.backend import Scoring
from engine.attention.cache import CacheGeometry
from engine.errors import BackendUnavailable

# Graphs for decoding and for prompts, with and without softcap, for several group sizes.
_MAX_GRAPHS = 16


class FlexMask(NamedTuple):
    """Inputs of the kernel's mask, padded to more rows.

    `logical`: `[room, blocks]` int32, index of a pool block in the row's own sequence, or -1. `first`: `[room]` int32,
    position of the row's first query. `window`: `[]` int32.
    """

    logical: torch.Tensor
    first: torch.Tensor
    window: torch.Tensor


class FlexLists(NamedTuple):
    """A BlockMask's lists: int32 counts `[rows, 1, 1]` and indices `[rows, 1, 1, columns]`."""

    partial_counts: torch.Tensor
    partial: torch.Tensor
    full_counts: torch.Tensor
    full: torch.Tensor


class FlexShape(NamedTuple):
    """Numbers compiled into a graph. `stride`: blocks of the viewed sequence for each block of the pool.

    With `sink_slot`, sinks are the scores of slot 0, which the lists contain and whose V is zero.
    """

    block_size: int
    stride: int
    group: int
    query_block: int
    sink_slot: bool = False


# Scaling; the cap, and sinks `[kv_heads, group]`, if there are any.
FlexScores = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
FlexGraphs = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, FlexMask, FlexLists, FlexScores, FlexShape], torch.Tensor
]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: FlexMask,
    lists: FlexLists,
    scores: FlexScores,
    shape: FlexShape,
) -> torch.Tensor:
    """Return `[rows, kv_heads, length * group, value_size]`: attention of the rows' tokens over visible slots."""
    scaling, softcap, sinks = scores

    def visible(row: torch.Tensor, _head: torch.Tensor, query_index: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        block = mask.logical[row, slot // (shape.block_size * shape.stride)]
        back = mask.first[row] + query_index // shape.group - (block * shape.block_size + slot % shape.block_size)
        seen = (block >= 0) & (back >= 0) & (back < mask.window)
        return seen | (slot == 0) if shape.sink_slot else seen

    def scaled(
        score: torch.Tensor, _row: torch.Tensor, head: torch.Tensor, query_index: torch.Tensor, slot: torch.Tensor
    ) -> torch.Tensor:
        product = score * scaling
        product = product if softcap is None else softcap * torch.tanh(product / softcap)
        if sinks is None or not shape.sink_slot:
            return product
        return torch.where(slot == 0, sinks[head, query_index % shape.group], product)

    block_mask = flex.BlockMask.from_kv_blocks(
        *lists,
        BLOCK_SIZE=(shape.query_block, shape.block_size),
        mask_mod=visible,
        seq_lengths=(query.shape[2], key.shape[2]),
        compute_q_blocks=False,
    )
    options = _gpu_options(shape) if query.device.type == "cuda" else None
    given: dict[str, Any] = {
        "score_mod": scaled,
        "block_mask": block_mask,
        "scale": 1.0,
        "kernel_options": options,
    }
    if sinks is None or shape.sink_slot:
        attended: torch.Tensor = flex.flex_attention(query, key, value, **given)
        return attended
    attended, logarithms = flex.flex_attention(query, key, value, return_aux=flex.AuxRequest(lse=True), **given)
    # A sink adds to the weights of all slots together, so it takes the same share of each.
    of_rows = sinks.repeat(1, query.shape[2] // shape.group)
    return attended * torch.sigmoid(logarithms.lse - of_rows)[..., None].to(attended.dtype)


def compile_graphs() -> FlexGraphs:
    """Compile at the first call, and again for each other kind of call; the number of rows does not matter."""
    # torch's overloads lack these two options. Without them all backends of a process share a limit of eight graphs.
    limits: dict[str, Any] = {"recompile_limit": _MAX_GRAPHS, "isolate_recompiles": True}
    graphs: FlexGraphs = torch.compile(attend, fullgraph=True, dynamic=False, **limits)
    return graphs


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run FlexAttention eagerly. By default it traces each new shape of a call, up to a limit, and warns."""
    before = flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG
    flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    try:
        yield
    finally:
        flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = before


def check_graphs(geometry: CacheGeometry, block_size: int, device_blocks: int, device: torch.device) -> None:
    """Raise BackendUnavailable if the kernels cannot be compiled, or not for this block size."""
    if device.type != "cpu":
        _check_gpu(geometry, block_size, device_blocks)
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch._inductor.kernel.flex.flex_cpu import check_cpu_supported

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as missing:
        raise BackendUnavailable("FlexAttention's CPU kernels need a C++ compiler, but none was found") from missing
    if not check_cpu_supported():  # type: ignore[no-untyped-call]
        raise BackendUnavailable("FlexAttention's CPU kernels need AVX2")


def _check_gpu(geometry: CacheGeometry, block_size: int, device_blocks: int) -> None:
    if _tile(block_size) < 16:
        raise BackendUnavailable(
            f"block_size must be a multiple of 16 for FlexAttention's GPU kernels, not {block_size}"
        )
    elements = (device_blocks + 1) * geometry.block_bytes(block_size, torch.uint8)
    if elements >= 2**31:
        raise BackendUnavailable(
            f"the cache must have fewer than 2**31 elements for FlexAttention's GPU kernels, not {elements}"
        )
    if not has_triton():
        raise BackendUnavailable("FlexAttention's GPU kernels need Triton, but it is not installed")


def _gpu_options(shape: FlexShape) -> flex.FlexKernelOptions:
    return {"BLOCK_M": shape.query_block, "BLOCK_N": min(64, _tile(shape.block_size))}


def _tile(block_size: int) -> int:
    """Return the largest power of two that divides the block size."""
    return block_size & -block_size


def next_power(number: int) -> int:
    """Return the smallest power of two that is at least `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()


@lru_cache(maxsize=256)  # layers may have sinks of their own
def scores_of(scoring: Scoring, kv_heads: int, device: torch.device) -> FlexScores:
    """Return scaling, cap and sinks as tensors, because numbers would be compiled in."""
    softcap = None if scoring.softcap is None else torch.tensor(scoring.softcap, device=device)
    sinks = None if scoring.sinks is None else scoring.sinks.detach().float().view(kv_heads, -1)
    return torch.tensor(scoring.scaling, device=device), softcap, sinks
