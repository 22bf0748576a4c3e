"""Which layers share a kind of blocks, and how memory is split among kinds."""

from hypothesis import given
from hypothesis import strategies as st

from blocks import blocks_for
from engine.attention.cache import CacheGeometry, LayerShape
from engine.kinds.layer_kinds import LayerKind, layer_kinds, most_blocks, one_kind, places_of
from engine.kinds.split import (
    MAX_COUNTING_BLOCKS,
    SplitSizes,
    host_blocks_of,
    host_blocks_within,
    split_blocks,
    split_memory,
)
from engine.model.sizing import cache_bytes
from kvmanager import limits

ALL = LayerShape(2, 8, 8)
NEAR, FAR, CHUNK = ALL._replace(window=7), ALL._replace(window=40), ALL._replace(window=16, chunked=True)
KINDS = (LayerKind((0,)), LayerKind((1, 2), 64), LayerKind((3,), 128, True))


def test_layers_of_equal_windows_share_a_kind() -> None:
    geometry = CacheGeometry((NEAR, ALL, FAR, NEAR, CHUNK, ALL))
    kinds = layer_kinds(geometry, context_tokens=96)
    assert [(kind.name, kind.layers) for kind in kinds] == [
        ("all", (1, 5)),
        ("window-7", (0, 3)),
        ("chunk-16", (4,)),
        ("window-40", (2,)),
    ]
    assert places_of(kinds) == ((1, 0), (0, 0), (3, 0), (1, 1), (2, 0), (0, 1))
    assert kinds[1].geometry(geometry) == CacheGeometry((NEAR, NEAR))


def test_a_window_of_the_whole_context_is_none() -> None:
    assert layer_kinds(CacheGeometry((ALL, FAR)), context_tokens=40) == (LayerKind((0, 1)),)
    assert one_kind(CacheGeometry((ALL, FAR))) == (LayerKind((0, 1)),)


def test_a_model_whose_layers_all_have_windows_has_a_kind_0_without_layers() -> None:
    assert [kind.layers for kind in layer_kinds(CacheGeometry((NEAR, NEAR)), 96)] == [(), (0, 1)]


@given(st.integers(1, 70), st.booleans(), st.integers(1, 20), st.integers(1, 16), st.data())
def test_a_sequence_never_needs_more_than_the_most_blocks(
    tokens: int, chunked: bool, step: int, size: int, data: st.DataObject
) -> None:
    window = LayerKind((0,), tokens, chunked).window(1, 0, 0)
    start = data.draw(st.integers(0, 200))
    held = blocks_for(start + step, size) - window.first_block(start, size)
    assert held <= window.most_blocks(step, size)


@given(st.integers(1, 64), st.integers(0, 1 << 24), st.integers(1, 2048))
def test_a_split_takes_at_most_the_memory_and_leaves_kind_0_the_rest(sequences: int, memory: int, typical: int) -> None:
    sizes = SplitSizes(16, 2048, 512, sequences, typical)
    block_bytes = (1024, 2048, 512)
    split = split_memory(KINDS, block_bytes, memory, sizes)
    windows = [[sizes.window_blocks(kind, count) for kind in KINDS[1:]] for count in range(1, sequences + 2)]
    taken = sum(cache_bytes(*one) for one in zip(split, block_bytes, strict=True))
    assert not split[0] or memory - block_bytes[0] < taken <= memory
    # The windows are those of as many typical sequences as the memory holds: more would not fit, or are not allowed.
    held = max(number for number, blocks in enumerate(windows[:sequences], 1) if list(split[1:]) == blocks)
    more = (min(held + 1, sequences) * blocks_for(typical, 16), *windows[min(held, sequences - 1)])
    assert held == sequences or sum(cache_bytes(*one) for one in zip(more, block_bytes, strict=True)) > memory


def test_without_bytes_of_its_own_kind_0_has_room_for_all_sequences() -> None:
    sizes = SplitSizes(16, 2048, 512, 4, 1024)
    split = split_memory((LayerKind(()), LayerKind((0,), 64)), (0, 1024), 1 << 20, sizes)
    assert split == (4 * 128, sizes.window_blocks(LayerKind((0,), 64), 4))


def test_without_bytes_kind_0_leaves_room_for_other_engines_of_a_manager() -> None:
    sizes = SplitSizes(16, 1 << 20, 512, 64, 1 << 19)
    window = LayerKind((0,), 64)
    split = split_memory((LayerKind(()), window), (0, 1024), 1 << 30, sizes)
    assert split == (MAX_COUNTING_BLOCKS, sizes.window_blocks(window, 64))
    assert 8 * MAX_COUNTING_BLOCKS <= limits.MAX_BLOCKS
    assert min(MAX_COUNTING_BLOCKS, limits.MAX_TABLE_BLOCKS) == limits.MAX_TABLE_BLOCKS, "the longest sequence fits"


def test_no_window_kind_has_more_blocks_than_kind_0() -> None:
    sizes = SplitSizes(16, 2048, 512, 4, 1024)
    assert split_blocks(KINDS, 10, sizes) == (10, 10, 10)
    assert split_blocks(KINDS, 10_000, sizes) == (10_000, 4 * 6 + 64, 4 * 10 + 64)
    assert most_blocks(KINDS[0], 2048, 512, 16) == 128


def test_host_blocks_are_in_the_proportion_of_a_typical_request() -> None:
    sizes = SplitSizes(16, 2048, 512, 4, 1024)
    assert host_blocks_of(KINDS, 0, sizes) == (0, 0, 0)
    assert host_blocks_of(KINDS, 640, sizes) == (640, 60, 100)


@given(st.integers(0, 1 << 24), st.integers(1, 2048), st.sampled_from([(1024, 2048, 512), (0, 2048, 512)]))
def test_the_memory_of_a_host_tier_holds_the_host_blocks_of_all_kinds(
    memory: int, typical: int, block_bytes: tuple[int, ...]
) -> None:
    sizes = SplitSizes(16, 2048, 512, 4, typical)

    def taken(blocks: int) -> int:
        return sum(cache_bytes(*one) for one in zip(host_blocks_of(KINDS, blocks, sizes), block_bytes, strict=True))

    found = host_blocks_within(KINDS, block_bytes, memory, sizes)
    assert taken(found) <= memory
    assert found == MAX_COUNTING_BLOCKS or taken(found + 1) > memory
