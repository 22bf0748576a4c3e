"""Features of the Triton backend beyond the table of all backends."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from blocks import Copy, blocks_for
from engine.attention.backend import Direction, PagedBatch, Scoring
from engine.attention.cache import CacheGeometry
from engine.schedule.request import Sampling
from engine.schedule.step_plan import Work
from tests.engine.paged_case import Case, Feed, naive_attention
from tests.engine.triton_case import DEVICE, make_triton_backend

pytest.importorskip("triton")
from engine.gpu.triton_backend import TritonBackend
from engine.triton_kernels import prefill
from engine.triton_kernels.tuning import Tiling, tuning_for
from engine.triton_kernels.work_list import tile_tokens

TOLERANCE = 2e-5
MIXED = (Feed(0, 1), Feed(37, 1), Feed(16, 1), Feed(0, 33), Feed(20, 13), Feed(63, 1), Feed(15, 17), Feed(3, 1))
SCORING = Scoring(0.25)
ON_A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.mark.parametrize("window", [None, 100])
def test_a_ragged_batch_with_and_without_a_window(window: int | None) -> None:
    feeds = [*MIXED, Feed(900, 1), Feed(400, 2), Feed(257, 130)]
    assert Case(feeds, group=3, scoring=Scoring(0.25, window), make=make_triton_backend()).run() < TOLERANCE


@pytest.mark.parametrize("window", [None, 10])
def test_prompts_may_begin_anywhere_in_a_tile_of_keys(window: int | None) -> None:
    keys = tuning_for(8, torch.float32, 2, DEVICE).prefill.keys
    feeds = [Feed(keys + distance, 3) for distance in range(-5, 3)]
    assert Case(feeds, scoring=Scoring(0.25, window), make=make_triton_backend()).run() < TOLERANCE


@pytest.mark.parametrize("window", [None, 20, 700])
def test_the_keys_of_a_tile_may_be_split_over_programs(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "split_count", lambda *_: 4)
    feeds = [Feed(1000, 3), Feed(0, 5), Feed(700, 50), Feed(300, 2), Feed(600, 1)]
    assert Case(feeds, kv_heads=1, group=3, scoring=Scoring(0.25, window), make=make_triton_backend()).run() < TOLERANCE


def test_few_new_tokens_behind_a_long_prefix_occupy_the_device() -> None:
    """Llama-3-8B on an H100 with 132 processors: 32 query heads share 8 KV heads, 132 programs run at once."""
    h100 = replace(
        tuning_for(128, torch.float32, 4, DEVICE), prefill=Tiling(128, 64, 8, 5), processors=132, min_chunk=256
    )

    def splits(fed: int, keys: int) -> int:
        tiles = -(-fed // tile_tokens(4, h100))
        return prefill.split_count(tiles, 8, keys, h100)

    assert splits(16, 32 * 1024 + 16) == 16, "128 programs of some 2,048 keys instead of 8 of 32,784"
    assert splits(64, 32 * 1024 + 64) == 8, "128 programs"
    assert splits(256, 32 * 1024 + 256) == 2
    assert splits(16, 300) == 1, "a short sequence is one chunk"
    assert splits(2048, 2048) == 1, "64 tiles occupy the device themselves"


def test_71_query_heads_may_share_a_kv_head() -> None:
    feeds = [Feed(37, 1), Feed(20, 13)]
    assert Case(feeds, kv_heads=1, group=71, make=make_triton_backend()).run() < TOLERANCE


def test_results_are_bitwise_independent_of_block_ids() -> None:
    feeds = [(300, 1), (90, 1), (40, 20), (0, 9)]
    ordered, shuffled = (_attended_with(feeds, shuffle) for shuffle in (False, True))
    assert torch.equal(ordered, shuffled)


def _attended_with(feeds: list[tuple[int, int]], shuffle: bool) -> torch.Tensor:
    torch.manual_seed(3)
    blocks = list(range(1, 61))
    if shuffle:
        random.Random(5).shuffle(blocks)
    backend = make_triton_backend()(CacheGeometry.uniform(1, 2, 16), 16, 60, torch.float32)
    work = []
    for number, (prefix, fed) in enumerate(feeds):
        table = tuple(blocks.pop() for _ in range(blocks_for(prefix + fed, 16)))
        if prefix:
            _write(backend, Work(number, (0,) * prefix, 0, table, True, Sampling()))
        work.append(Work(number, (0,) * fed, prefix, table, True, Sampling()))
    _write(backend, *work)
    query = torch.randn(sum(fed for _, fed in feeds), 6, 16).to(DEVICE)
    return backend.attend(0, query, PagedBatch.of(work, 16, DEVICE), SCORING)


def _write(backend: TritonBackend, *work: Work) -> None:
    batch = PagedBatch.of(work, backend.block_size, DEVICE)
    heads = (backend.geometry.kv_heads, backend.geometry.head_size)
    key, value = torch.randn(2, sum(batch.fed), *heads).to(DEVICE, backend.cache.dtype)
    backend.write(0, key, value, batch)


def test_layers_with_different_windows_share_a_batch() -> None:
    torch.manual_seed(1)
    backend = make_triton_backend()(CacheGeometry.uniform(1, 1, 16), 16, 30, torch.float32)
    table = tuple(range(1, 26))
    key, value = torch.randn(2, 400, 1, 16)
    prefix = PagedBatch.of([Work(1, (0,) * 399, 0, table, True, Sampling())], 16, DEVICE)
    batch = PagedBatch.of([Work(1, (0,), 399, table, True, Sampling())], 16, DEVICE)
    backend.write(0, key[:399].to(DEVICE), value[:399].to(DEVICE), prefix)
    backend.write(0, key[399:].to(DEVICE), value[399:].to(DEVICE), batch)
    query = torch.randn(1, 3, 16)
    for window in (None, 20, None, 150):
        scoring = Scoring(0.25, window)
        expected = naive_attention(query.double(), key.double(), value.double(), scoring)
        found = backend.attend(0, query.to(DEVICE), batch, scoring).cpu()
        assert (found - expected).abs().max() < TOLERANCE


class TestRecorded:
    """Decoding with preallocated buffers and varying lengths."""

    ROWS = 5
    LENGTHS = ([300, 1, 0, 40, 129], [3, 900, 500, 0, 0], [0, 0, 0, 0, 0], [256, 128, 64, 1, 1])

    @pytest.fixture
    def backend(self) -> TritonBackend:
        torch.manual_seed(0)
        backend: TritonBackend = make_triton_backend()(CacheGeometry.uniform(2, 2, 16), 16, 150, torch.float32)
        backend.cache.normal_()
        backend.cache[0] = math.nan
        return backend

    @pytest.fixture
    def batch(self) -> PagedBatch:
        tables = torch.randperm(150, generator=torch.Generator().manual_seed(2))[: self.ROWS * 30] + 1
        numbers = torch.arange(self.ROWS + 1, dtype=torch.int32, device=DEVICE)
        no_slots = torch.full((self.ROWS,), -1, dtype=torch.int64, device=DEVICE)
        tables = torch.cat([tables, tables]).view(self.ROWS, 60).to(DEVICE, torch.int32)
        return PagedBatch(16, (1,) * self.ROWS, no_slots, numbers, torch.zeros_like(numbers[1:]), tables)

    def check(
        self, backend: TritonBackend, batch: PagedBatch, query: torch.Tensor, output: torch.Tensor, lengths: list[int]
    ) -> None:
        cache = torch.stack((backend.keys(1), backend.values(1)), dim=1).cpu().double()
        for row, length in enumerate(lengths):
            expected = torch.full(query.shape[1:], 7.0)
            if length:
                key, value = cache[batch.tables[row].cpu().long()].permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :length]
                [expected] = naive_attention(query[row : row + 1].cpu().double(), key, value, SCORING)
            assert (output[row].cpu() - expected).abs().max() < TOLERANCE

    def test_one_set_of_buffers_serves_any_lengths_and_padding_is_unchanged(
        self, backend: TritonBackend, batch: PagedBatch
    ) -> None:
        work = backend.work_list(self.ROWS, 6)
        for lengths in self.LENGTHS:
            query = torch.randn(self.ROWS, 6, 16).to(DEVICE)
            output = torch.full_like(query, 7.0)
            batch.ends.copy_(torch.tensor(lengths))
            work.partial_output.fill_(math.nan)
            backend.list_work(work, batch, 6, None)
            backend.decode(1, query, output, batch, SCORING, work)
            self.check(backend, batch, query, output, lengths)

    @ON_A_GPU
    def test_a_graph_captured_once_is_replayed_for_any_lengths(self, backend: TritonBackend, batch: PagedBatch) -> None:
        work = backend.work_list(self.ROWS, 6)
        query = torch.randn(self.ROWS, 6, 16).to(DEVICE)
        output = torch.full_like(query, 7.0)

        def step() -> None:
            backend.list_work(work, batch, 6, None)
            backend.decode(1, query, output, batch, SCORING, work)

        batch.ends.fill_(1)
        step()  # compiles the kernels
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for lengths in self.LENGTHS:
            batch.ends.copy_(torch.tensor(lengths))
            query.normal_()
            output.fill_(7.0)
            graph.replay()
            self.check(backend, batch, query, output, lengths)


class TestBlocks:
    def test_a_block_of_more_than_one_program_is_copied_whole(self) -> None:
        backend = make_triton_backend()(CacheGeometry.uniform(5, 4, 128), 32, 3, torch.float32)
        backend.cache.normal_()
        before = backend.cache.clone()
        backend.copy_blocks([Copy(1, 3)])
        assert torch.equal(backend.cache, before[[0, 1, 2, 1]])

    @pytest.mark.skipif(DEVICE.type != "cpu", reason="launches are counted under the interpreter")
    @pytest.mark.parametrize("direction", Direction)
    def test_many_blocks_are_swapped_by_one_launch_of_few_programs(
        self, direction: Direction, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from triton.runtime.interpreter import InterpretedFunction

        launched: list[tuple[int, ...]] = []
        plain = InterpretedFunction.run

        def run(kernel: Any, *arguments: Any, grid: tuple[int, ...], **named: Any) -> None:
            launched.append(grid)
            plain(kernel, *arguments, grid=grid, **named)

        monkeypatch.setattr(InterpretedFunction, "run", run)
        backend = make_triton_backend()(CacheGeometry.uniform(2, 2, 4), 4, 40, torch.float32, host_blocks=40)
        assert backend.host_cache is not None
        source, target = backend.cache, backend.host_cache
        if direction is Direction.HOST_TO_DEVICE:
            source, target = target, source
        source.normal_()
        backend.swap([Copy(block, 41 - block) for block in range(1, 40, 2)], direction)
        expected = torch.zeros_like(target)
        expected[2:41:2] = source[range(39, 0, -2)]
        assert torch.equal(target, expected)
        assert launched == [(16,)]

    def test_a_write_changes_its_own_slots_only_and_attending_and_padding_none(self) -> None:
        backend = make_triton_backend()(CacheGeometry.uniform(3, 2, 4), 4, 6, torch.float32)
        backend.cache.normal_()
        expected = backend.cache.clone()
        work = [Work(1, (0,) * 3, 2, (5, 2), True, Sampling()), Work(2, (0,), 4, (1, 6), True, Sampling())]
        batch = PagedBatch.of(work, 4, DEVICE)
        batch.slots[1] = -1
        key, value = torch.randn(2, 4, 2, 4).to(DEVICE)
        backend.write(1, key, value, batch)
        backend.attend(1, torch.randn(4, 4, 4).to(DEVICE), batch, SCORING)
        for token, block, slot in ((0, 5, 2), (2, 2, 0), (3, 6, 0)):
            expected[block, 1, 0, :, slot] = key[token]
            expected[block, 1, 1, :, slot] = value[token]
        assert torch.equal(backend.cache, expected)
