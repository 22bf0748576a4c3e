"""Compares K and V of a block with recomputed ones, which differ by rounding if a step had other rows."""

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from engine.attention.cache import CacheLayout, Part

# Largest difference over the largest element of K or V of a layer. Steps of other sizes add in another order, and
# deeper layers read what the earlier ones have rounded; contents of other tokens differ by more than 1.
_TOLERANCES = {torch.float32: 1e-2, torch.float16: 0.1, torch.bfloat16: 0.2}
# Of codes, whose places depend on the backend: how many of the bytes may differ by more than this.
_CODES = 32
_DIFFERENT_CODES = 0.05


class ComparedBackend(Protocol):
    """The blocks of one kind."""

    cache: torch.Tensor
    layout: CacheLayout


def close_blocks(backends: Sequence[ComparedBackend]) -> Callable[[int, int, int], bool]:
    """Return what compares two blocks of a kind, whose backends are given."""
    return lambda kind, one, other: is_close(
        backends[kind].cache[one], backends[kind].cache[other], backends[kind].layout
    )


def is_close(block: torch.Tensor, other: torch.Tensor, layout: CacheLayout) -> bool:
    """Return whether two blocks `[elements]` have the same K and V but for rounding.

    In 8 bits a few wrong numbers of a block are not found, because codes depend on the largest number beside them.
    """
    if block.dtype == torch.int8:
        different = (block.to(torch.int16) - other.to(torch.int16)).abs() > _CODES
        return not len(block) or float(different.float().mean()) <= _DIFFERENT_CODES
    tolerance = _TOLERANCES[block.dtype]
    parts = [part for layer in layout.parts for part in layer]
    return all(_is_close(_numbers(block, part), _numbers(other, part), tolerance) for part in parts)


def _numbers(block: torch.Tensor, part: Part) -> torch.Tensor:
    return block[part.offset : part.offset + math.prod(part.shape)].float()


def _is_close(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> bool:
    # Also False for what is not a number.
    return bool((one - other).abs().max() <= tolerance * other.abs().max())
