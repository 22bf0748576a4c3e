"""Block copies within and between the tiers: their contiguous ranges, and their results."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blocks import Copy
from engine.attention.cache import copy_blocks, swap_blocks

BLOCKS = 9
# Each destination at most once, in any order; runs of adjacent blocks are frequent.
COPIES = st.dictionaries(st.integers(0, BLOCKS - 1), st.integers(0, BLOCKS - 1)).map(
    lambda found: [Copy(source, destination) for destination, source in found.items()]
) | st.builds(
    lambda source, destination, count: [Copy(source + step, destination + step) for step in range(count)],
    *[st.integers(0, 4)] * 3,
)


def numbered(sign: int) -> torch.Tensor:
    return sign * torch.arange(1.0, BLOCKS * 4 + 1).view(BLOCKS, 2, 2)


@given(COPIES, st.booleans())
def test_a_swap_of_many_blocks_equals_swaps_of_one(copies: list[Copy], to_host: bool) -> None:
    tiers = (numbered(1), numbered(-1))
    source, target = tiers if to_host else tiers[::-1]
    expected, source_before = target.clone(), source.clone()
    for copy in copies:
        expected[copy.destination] = source[copy.source]
    swap_blocks(*tiers, copies, to_host=to_host)
    assert torch.equal(target, expected)
    assert torch.equal(source, source_before)


@given(COPIES)
def test_copies_within_a_cache_equal_single_copies(copies: list[Copy]) -> None:
    destinations = {copy.destination for copy in copies}
    copies = [copy for copy in copies if copy.source not in destinations]
    cache = numbered(1)
    expected = cache.clone()
    for copy in copies:
        expected[copy.destination] = expected[copy.source]
    copy_blocks(cache, copies)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize(
    ("copies", "ranges"),
    [
        ([], 0),
        ([(1, 5)], 1),
        ([(1, 5), (2, 6), (3, 7)], 1),
        ([(1, 5), (2, 7)], 2),  # the destinations are not adjacent
        ([(1, 5), (3, 6)], 2),  # the sources are not adjacent
        ([(2, 6), (1, 5)], 2),  # not sorted
        ([(1, 5), (1, 6)], 2),
        ([(4, 1), (5, 2), (1, 7), (2, 8), (8, 3)], 3),
    ],
)
def test_blocks_adjacent_on_both_sides_are_copied_as_one_range(copies: list[tuple[int, int]], ranges: int) -> None:
    with patch.object(torch.Tensor, "copy_", autospec=True) as copied:
        swap_blocks(numbered(1), numbered(-1), [Copy(*copy) for copy in copies], to_host=True)
    assert copied.call_count == ranges
