"""Every head and every row belongs to exactly one rank."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.attention.cache import CacheGeometry, LayerShape
from engine.errors import ModelUnsupported
from engine.model.sizing import check_ranks
from engine.parallel.shard import Shard


@given(st.integers(1, 9), st.integers(0, 40))
def test_the_parts_of_all_ranks_are_the_whole(size: int, count: int) -> None:
    rows = [row for rank in range(size) for row in range(count)[Shard(rank, size).part(count)]]
    assert rows == list(range(count))


@given(st.integers(1, 6), st.integers(1, 6))
def test_the_heads_of_all_ranks_are_the_whole(size: int, each: int) -> None:
    heads = [head for rank in range(size) for head in range(size * each)[Shard(rank, size).heads(size * each)]]
    assert heads == list(range(size * each))


def test_heads_that_do_not_divide_are_refused_with_the_sizes_that_do() -> None:
    with pytest.raises(ModelUnsupported, match=r"tensor_parallel is 2, .* 9 attention heads and 3 KV heads: .* 1, 3$"):
        check_ranks(2, 9, CacheGeometry.uniform(2, 3, 8))
    check_ranks(3, 9, CacheGeometry.uniform(2, 3, 8))


def test_the_heads_of_every_layer_have_to_divide() -> None:
    geometry = CacheGeometry((LayerShape(4, 8, 8), LayerShape(2, 16, 8)))
    with pytest.raises(ModelUnsupported, match=r"8 attention heads and 2 or 4 KV heads: possible are 1, 2$"):
        check_ranks(4, 8, geometry)
    check_ranks(2, 8, geometry)
    assert geometry.of_rank(2).layers == (LayerShape(2, 8, 8), LayerShape(1, 16, 8))
