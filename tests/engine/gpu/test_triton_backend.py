"""Features of the Triton backend beyond the table of all backends."""

import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from blocks import Copy, blocks_for
from engine.attention.backend import Direction, PagedBatch, Scoring
from engine.attention.cache import CacheGeometry, LayerShape
from engine.errors import BackendUnavailable
from engine.schedule.request import Sampling
from engine.schedule.step_plan import Work
from tests.engine.paged_case import Case, Feed, naive_attention
from tests.engine.triton_case import DEVICE, make_triton_backend

pytest.importorskip("triton")
from engine.gpu import triton_backend
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


@pytest.mark.parametrize(("group", "size"), [(1, 8), (3, 512), (71, 8)])
def test_more_items_and_query_heads_are_combined_than_are_read_at_once(
    group: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 44 items of 16 keys, 16 at once; of the query heads, as many as have 512 elements."""
    usual = tuning_for(size, torch.float32, group, DEVICE)
    tuned = replace(usual, decode=replace(usual.decode, keys=16), programs=88, waves=1, min_chunk=1)
    monkeypatch.setattr(triton_backend, "tuning_for", lambda *_: tuned)
    case = Case([Feed(700, 1), Feed(3, 1), Feed(270, 1)], kv_heads=1, group=group, head_size=size, sinks=True)
    assert replace(case, make=make_triton_backend()).run() < TOLERANCE


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
    kv_heads, *sizes = backend.geometry.layers[0][:3]
    key, value = (torch.randn(sum(batch.fed), kv_heads, size).to(DEVICE, backend.cache.dtype) for size in sizes)
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


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(("size", "value_size"), [(192, 128), (16, 80), (512, 0)])
def test_sinks_count_once_however_keys_are_split_and_values_may_have_another_size(
    size: int, value_size: int, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "split_count", lambda *_: splits)
    feeds = [Feed(600, 1), Feed(37, 1), Feed(20, 13), Feed(500, 3)]
    scoring = Scoring(size**-0.5, 400 if splits > 1 else None)
    case = Case(feeds, group=3, head_size=size, value_size=value_size, sinks=True, scoring=scoring)
    assert replace(case, make=make_triton_backend()).run() < TOLERANCE


class Attended:
    """A layer's attention over random K and V, beside that in float64, `[tokens, heads, value_size]`."""

    def __init__(self, backend: TritonBackend, layer: int, feeds: list[Feed], heads: int) -> None:
        torch.manual_seed(4)
        self._backend, self._layer = backend, layer
        shape = backend.geometry.layers[layer]
        blocks = list(range(1, len(backend.cache)))
        work = []
        self._sequences = []
        for number, (prefix, fed) in enumerate(feeds):
            table = tuple(blocks.pop() for _ in range(blocks_for(prefix + fed, backend.block_size)))
            key, value = (torch.randn(prefix + fed, shape.kv_heads, size) for size in shape[1:3])
            everything = Work(number, (0,) * len(key), 0, table, True, Sampling())
            whole = PagedBatch.of([everything], backend.block_size, DEVICE)
            backend.write(layer, key.to(DEVICE), value.to(DEVICE), whole)
            work.append(Work(number, (0,) * fed, prefix, table, True, Sampling()))
            self._sequences.append((torch.randn(fed, heads, shape.key_size), key, value))
        self.work = work

    def output(self, batch: PagedBatch, scoring: Scoring) -> torch.Tensor:
        query = torch.cat([query for query, _, _ in self._sequences]).to(DEVICE)
        return self._backend.attend(self._layer, query, batch, scoring).cpu()

    def expected(self, scoring: Scoring) -> torch.Tensor:
        return torch.cat([naive_attention(*(one.double() for one in each), scoring) for each in self._sequences])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sinks_far_above_or_below_all_scores_leave_nothing_or_all(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "split_count", lambda *_: 3)
    backend = make_triton_backend()(CacheGeometry.uniform(1, 1, 16), 16, 60, torch.float32)
    feeds = [Feed(400, 1), Feed(20, 1), Feed(300, 4), Feed(0, 5)]
    attended = Attended(backend, 0, feeds, 6)
    batch = PagedBatch.of(attended.work, 16, DEVICE)
    sinks = torch.tensor([2.0**100, 256.0, 3.0, -256.0, -(2.0**100), -math.inf], dtype=dtype)
    sunk = attended.output(batch, SCORING._replace(sinks=sinks.to(DEVICE)))
    assert (sunk[:, :2].abs() < 1e-30).all()
    assert torch.equal(sunk[:, 3:], attended.output(batch, SCORING)[:, 3:])
    assert (sunk - attended.expected(SCORING._replace(sinks=sinks))).abs().max() < TOLERANCE


def test_layers_of_different_shapes_share_a_cache_and_a_batch() -> None:
    shapes = (LayerShape(2, 16, 16), LayerShape(1, 40, 16), LayerShape(4, 8, 40), LayerShape(2, 16, 16))
    backend = make_triton_backend()(CacheGeometry(shapes), 16, 60, torch.float32)
    backend.cache.fill_(math.nan)
    layers = [Attended(backend, number, [Feed(500, 1), Feed(9, 1), Feed(20, 13)], 4) for number in range(len(shapes))]
    batch = PagedBatch.of(layers[0].work, 16, DEVICE)
    for attended in layers:
        assert (attended.output(batch, SCORING) - attended.expected(SCORING)).abs().max() < TOLERANCE


def test_heads_that_the_kernels_cannot_hold_are_refused() -> None:
    geometry = CacheGeometry((LayerShape(1, 576, 512),))
    with pytest.raises(BackendUnavailable, match="at most 512, not 576"):
        make_triton_backend()(geometry, 16, 1, torch.float32)


@pytest.mark.parametrize("shape", [LayerShape(2, 16, 16), LayerShape(3, 24, 40)])
class TestRecorded:
    """Decoding with preallocated buffers and varying lengths, in the second of two layers of different shapes."""

    ROWS = 5
    SINKS = Scoring(0.25, sinks=torch.tensor([0.0, 3.0, -3.0, 30.0, -30.0, 1.0], device=DEVICE))
    LENGTHS = ([300, 1, 0, 40, 129], [3, 900, 500, 0, 0], [0, 0, 0, 0, 0], [256, 128, 64, 1, 1])

    @pytest.fixture
    def backend(self, shape: LayerShape) -> TritonBackend:
        torch.manual_seed(0)
        geometry = CacheGeometry((LayerShape(2, 16, 16), shape))
        backend: TritonBackend = make_triton_backend()(geometry, 16, 150, torch.float32)
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

    def query_and_output(self, backend: TritonBackend) -> tuple[torch.Tensor, torch.Tensor]:
        _, key_size, value_size = backend.geometry.layers[1][:3]
        query, output = torch.randn(self.ROWS, 6, key_size), torch.full((self.ROWS, 6, value_size), 7.0)
        return query.to(DEVICE), output.to(DEVICE)

    def check(
        self, backend: TritonBackend, batch: PagedBatch, query: torch.Tensor, output: torch.Tensor, lengths: list[int]
    ) -> None:
        scoring = self.SINKS._replace(sinks=self.SINKS.sinks.cpu())
        for row, length in enumerate(lengths):
            expected = torch.full(output.shape[1:], 7.0)
            if length:
                key, value = (
                    pages[batch.tables[row].long()].cpu().double().transpose(1, 2).flatten(0, 1)[:length]
                    for pages in (backend.keys(1), backend.values(1))
                )
                [expected] = naive_attention(query[row : row + 1].cpu().double(), key, value, scoring)
            assert (output[row].cpu() - expected).abs().max() < TOLERANCE

    def test_one_set_of_buffers_serves_any_lengths_and_padding_is_unchanged(
        self, backend: TritonBackend, batch: PagedBatch
    ) -> None:
        work = backend.work_list(1, self.ROWS, 6)
        for lengths in self.LENGTHS:
            query, output = self.query_and_output(backend)
            batch.ends.copy_(torch.tensor(lengths))
            work.partial_output.fill_(math.nan)
            backend.list_work(1, work, batch, 6, None)
            for _layer in range(2):  # the second begins with the counters that the first leaves
                output.fill_(7.0)
                backend.decode(1, query, output, batch, self.SINKS, work)
                self.check(backend, batch, query, output, lengths)
                assert not work.arrived.any()

    @ON_A_GPU
    def test_a_graph_captured_once_is_replayed_for_any_lengths(self, backend: TritonBackend, batch: PagedBatch) -> None:
        work = backend.work_list(1, self.ROWS, 6)
        query, output = self.query_and_output(backend)

        def step() -> None:
            backend.list_work(1, work, batch, 6, None)
            backend.decode(1, query, output, batch, self.SINKS, work)

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
    @pytest.mark.parametrize(("size", "programs", "warps"), [(128, 4, 16), (4, 20, 1)])
    def test_many_blocks_are_swapped_by_one_launch_of_few_programs(
        self, direction: Direction, size: int, programs: int, warps: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Blocks of 64 KiB by 4 programs; of 2 KiB by one for each of the 20."""
        from triton.runtime.interpreter import InterpretedFunction

        launched: list[tuple[tuple[int, ...], int]] = []
        plain = InterpretedFunction.run

        def run(kernel: Any, *arguments: Any, grid: tuple[int, ...], **named: Any) -> None:
            launched.append((grid, named["num_warps"]))
            plain(kernel, *arguments, grid=grid, **named)

        monkeypatch.setattr(InterpretedFunction, "run", run)
        backend = make_triton_backend()(CacheGeometry.uniform(2, 2, size), 16, 40, torch.float32, host_blocks=40)
        assert backend.host_cache is not None
        source, target = backend.cache, backend.host_cache
        if direction is Direction.HOST_TO_DEVICE:
            source, target = target, source
        source.normal_()
        backend.swap([Copy(block, 41 - block) for block in range(1, 40, 2)], direction)
        expected = torch.zeros_like(target)
        expected[2:41:2] = source[range(39, 0, -2)]
        assert torch.equal(target, expected)
        assert launched == [((programs,), warps)]

    def test_a_write_changes_its_own_slots_only_and_attending_and_padding_none(self) -> None:
        shapes = (LayerShape(3, 4, 4), LayerShape(2, 4, 6), LayerShape(1, 4, 4))
        backend = make_triton_backend()(CacheGeometry(shapes), 4, 6, torch.float32)
        backend.cache.normal_()
        expected = backend.cache.clone()
        expected_keys, expected_values = (part.of(expected) for part in backend.layout.parts[1])
        work = [Work(1, (0,) * 3, 2, (5, 2), True, Sampling()), Work(2, (0,), 4, (1, 6), True, Sampling())]
        batch = PagedBatch.of(work, 4, DEVICE)
        batch.slots[1] = -1
        key, value = (torch.randn(4, 2, size).to(DEVICE) for size in (4, 6))
        backend.write(1, key, value, batch)
        backend.attend(1, torch.randn(4, 4, 4).to(DEVICE), batch, SCORING)
        for token, block, slot in ((0, 5, 2), (2, 2, 0), (3, 6, 0)):
            expected_keys[block, :, slot] = key[token]
            expected_values[block, :, slot] = value[token]
        assert torch.equal(backend.cache, expected)
