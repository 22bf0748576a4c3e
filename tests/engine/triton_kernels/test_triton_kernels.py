"""Each kernel of the Triton backend against a few lines of Python or torch."""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention.backend import PagedBatch
from engine.attention.cache import CacheGeometry, CacheLayout, Part
from tests.engine.triton_case import DEVICE

pytest.importorskip("triton")
from engine.triton_kernels import work_list
from engine.triton_kernels.paged_layer import PagedLayer
from engine.triton_kernels.rotary_write import HeadNorms, write_rotated
from engine.triton_kernels.tuning import Tuning, tuning_for
from engine.triton_kernels.work_list import WorkList, list_work, tile_count, tile_tokens

TYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def batch_of(sequences: list[tuple[int, int]]) -> PagedBatch:
    """Return the metadata of sequences, pairs of fed tokens and length; they have no blocks."""
    fed = tuple(fed for fed, _ in sequences)
    first, ends = (
        torch.tensor(column, dtype=torch.int32, device=DEVICE)
        for column in ([0, *accumulate(fed)], [end for _, end in sequences])
    )
    no_blocks = torch.empty(len(fed), 0, dtype=torch.int32, device=DEVICE)
    return PagedBatch(16, fed, torch.empty(sum(fed), dtype=torch.int64), first, ends, no_blocks)


def tuned(keys: int, min_chunk: int, pieces: int, rows: int) -> Tuning:
    usual = tuning_for(16, torch.float32, 1, DEVICE)
    return replace(
        usual,
        decode=replace(usual.decode, keys=keys),
        prefill=replace(usual.prefill, rows=rows),
        programs=pieces,
        waves=1,
        min_chunk=min_chunk,
    )


def check_work(sequences: list[tuple[int, int]], kv_heads: int, group: int, window: int | None, tuning: Tuning) -> None:
    """Compare the work list with the visible and fed tokens of the sequences."""
    batch = batch_of(sequences)
    layer = PagedLayer.of(torch.empty(1, 2, device=DEVICE), (Part(0, (kv_heads, 1, 1)), Part(1, (kv_heads, 1, 1))))
    work = WorkList.allocate(len(sequences), tile_count(batch, group, tuning), kv_heads * group, layer, tuning)
    list_work(work, batch, kv_heads, group, window, tuning)
    item_count, found_tiles = work.totals.tolist()
    assert item_count <= len(work.items)
    assert found_tiles == len(work.tiles)
    items = work.items[:item_count].tolist()
    seen = [min(end, window or end) if fed == 1 else 0 for fed, end in sequences]
    share = max(tuning.min_chunk, -(-sum(seen) * kv_heads // tuning.pieces))
    for number, (fed, end) in enumerate(sequences):
        mine = [(begin, stop) for sequence, begin, stop, _ in items if sequence == number]
        assert [token for begin, stop in mine for token in range(begin, stop)] == list(range(end - seen[number], end))
        assert all(0 < stop - begin < share + tuning.decode.keys for begin, stop in mine)
        assert all((stop - begin) % tuning.decode.keys == 0 for begin, stop in mine[:-1])
        item, count = work.pieces[number].tolist()
        assert [sequence for sequence, *_ in items[item : item + count]] == [number] * len(mine)
        assert {alone for sequence, *_, alone in items if sequence == number} <= {int(len(mine) == 1)}
        begins = sorted(begin for sequence, begin in work.tiles.tolist() if sequence == number)
        assert begins == (list(range(0, fed, tile_tokens(group, tuning))) if fed > 1 else [])


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    sequences=st.lists(
        st.tuples(st.sampled_from([0, 1, 1, 1, 2, 9, 40]), st.integers(0, 60)).map(
            lambda pair: (pair[0], pair[1] + pair[0] if pair[0] > 1 else pair[1])
        ),
        min_size=1,
        max_size=8,
    ),
    kv_heads=st.integers(1, 4),
    group=st.integers(1, 5),
    window=st.none() | st.integers(1, 70),
    tuning=st.builds(
        tuned,
        keys=st.sampled_from([1, 2, 8]),
        min_chunk=st.integers(1, 20),
        pieces=st.integers(1, 12),
        rows=st.sampled_from([8, 16]),
    ),
)
def test_the_work_list_covers_the_visible_and_fed_tokens_exactly(
    sequences: list[tuple[int, int]], kv_heads: int, group: int, window: int | None, tuning: Tuning
) -> None:
    check_work(sequences, kv_heads, group, window, tuning)


def test_more_sequences_than_one_round_of_the_planner_have_their_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_list, "_LANES", 8)
    sequences = [(1 + number % 3 // 2 * 20, 30 + number) for number in range(20)]
    check_work(sequences, 2, 3, None, tuned(16, 64, 40, 16))


def rotated(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotate `[tokens, heads, head_size]` as transformers' Llama does."""
    left, right = heads.chunk(2, dim=-1)
    both = torch.cat((cosines, cosines), -1)[:, None], torch.cat((sines, sines), -1)[:, None]
    return heads * both[0] + torch.cat((-right, left), -1) * both[1]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("kv_heads", "group", "size"), [(2, 3, 16), (1, 5, 80), (3, 1, 2)])
@pytest.mark.parametrize("normed", [True, False])
def test_queries_and_keys_are_normalized_and_rotated_and_padding_is_unchanged(
    dtype: torch.dtype, kv_heads: int, group: int, size: int, normed: bool
) -> None:
    torch.manual_seed(0)
    heads, block_size, layer = kv_heads * group, 4, 1
    memory = torch.randn(9, 3, 2, kv_heads, block_size, size).to(DEVICE, dtype)
    expected = memory.clone()
    positions = torch.tensor([0, 5, -1, 11, 6, 3])
    slots = torch.tensor([12, 29, 17, 23, 10, -1])  # token 2 has no position, token 5 no slot
    padding = [2, 5]
    projected = torch.randn(6, (heads + 2 * kv_heads) * size).to(DEVICE, dtype)
    angles = torch.rand(12, size // 2) * 6
    rotations = torch.cat((angles.cos(), angles.sin()), -1).to(DEVICE)
    query = torch.full((6, heads, size), 7.0, dtype=dtype, device=DEVICE)
    weights = torch.randn(2, size).to(DEVICE, dtype)
    norms = HeadNorms(*weights, 1e-5) if normed else None
    layout = CacheLayout.of(CacheGeometry.uniform(3, kv_heads, size), lambda heads, size: (heads, block_size, size))
    paged = PagedLayer.of(memory.view(9, -1), layout.parts[layer])
    write_rotated(projected, positions.to(DEVICE), rotations, query, paged, slots.to(DEVICE), norms)

    split = projected.float().view(6, heads + 2 * kv_heads, size).split((heads, kv_heads, kv_heads), 1)
    scaled = [
        torch.nn.functional.rms_norm(*part, 1e-5)
        for part in zip(split[:2], ((size,),) * 2, weights.float(), strict=True)
    ]
    turned = [
        rotated(part, *rotations[positions.clamp(min=0)].chunk(2, -1)) for part in (scaled if normed else split[:2])
    ]
    for token in set(range(6)).difference(padding):
        block, offset = divmod(int(slots[token]), block_size)
        assert torch.allclose(query[token].float(), turned[0][token], TYPES[dtype], TYPES[dtype])
        assert torch.allclose(memory[block, layer, 0, :, offset].float(), turned[1][token], TYPES[dtype], TYPES[dtype])
        assert torch.equal(memory[block, layer, 1, :, offset].float(), split[2][token])
        expected[block, layer, :, :, offset] = memory[block, layer, :, :, offset]
    assert (query[padding] == 7).all()
    assert torch.equal(memory, expected)
