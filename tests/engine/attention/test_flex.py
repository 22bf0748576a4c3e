"""FlexAttention's masks against a mask of each pair of positions, and its compiled kernels."""

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blocks import blocks_for
from engine.attention import PagedBatch, TorchBackend
from engine.attention.backend import Scoring
from engine.attention.cache import CacheGeometry
from engine.attention.flex_backend import FlexBackend
from engine.attention.flex_mask import BlockLists, block_lists, query_rows
from engine.attention.tensor_backend import TensorBackend
from engine.errors import BackendUnavailable
from engine.schedule.limits import Preemption
from engine.schedule.request import Sampling
from engine.schedule.step_plan import Work
from tests.engine.paged_case import CPU, Case, Feed
from tests.engine_in_process import ModelEngine
from tests.reference import near_ties

# torch's compiler imports modules that torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")

FEEDS = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from([1, 1, 2, 5, 19])).map(lambda pair: Feed(*pair)),
    min_size=1,
    max_size=5,
)
MIXED = (Feed(0, 1), Feed(37, 1), Feed(16, 1), Feed(0, 33), Feed(20, 13), Feed(15, 17))
# One graph for decoding and one for prompts.
KINDS = 2


@pytest.fixture(autouse=True)
def forget_graphs() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def scattered(feeds: list[Feed], block_size: int, draw: random.Random, spare: int = 3) -> tuple[PagedBatch, int]:
    """Return a batch with random block ids, and the number of blocks."""
    counts = [blocks_for(sum(feed), block_size) for feed in feeds]
    blocks = draw.sample(range(1, sum(counts) + spare + 1), sum(counts))
    work = []
    for number, (feed, count) in enumerate(zip(feeds, counts, strict=True)):
        table, blocks = tuple(blocks[:count]), blocks[count:]
        work.append(Work(number, (0,) * feed.fed, feed.prefix, table, True, Sampling()))
    return PagedBatch.of(work, block_size, CPU), sum(counts) + spare


def chosen(lists: BlockLists, row: int) -> tuple[list[int], list[int]]:
    full, partial_ = lists.full[row, : lists.full_counts[row]], lists.partial[row, : lists.partial_counts[row]]
    return full.tolist(), partial_.tolist()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    feeds=FEEDS, block_size=st.integers(1, 20), window=st.integers(1, 50), length=st.integers(1, 8), seed=st.integers()
)
def test_full_blocks_are_visible_whole_and_partial_blocks_in_part(
    feeds: list[Feed], block_size: int, window: int, length: int, seed: int
) -> None:
    batch, _ = scattered(feeds, block_size, random.Random(seed))
    width = batch.tables.shape[1]
    for rows in query_rows(batch, length):
        lists = block_lists(rows.first, rows.last, window, block_size, width)
        for row, (first, last) in enumerate(zip(rows.first.tolist(), rows.last.tolist(), strict=True)):
            back = torch.arange(first, last + 1)[:, None] - torch.arange(width * block_size)
            seen = ((back >= 0) & (back < window)).view(-1, width, block_size)
            whole, some = seen.all(2).all(0), seen.any(2).any(0)
            expected = ([], []) if first > last else (whole.nonzero(), (some & ~whole).nonzero())
            assert chosen(lists, row) == tuple([int(block) for block in blocks] for blocks in expected)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(feeds=FEEDS, length=st.integers(1, 8))
def test_every_fed_token_is_in_one_row_at_its_position(feeds: list[Feed], length: int) -> None:
    batch, _ = scattered(feeds, 4, random.Random(0))
    positions = [position for prefix, fed in feeds for position in range(prefix, prefix + fed)]
    owners = [number for number, feed in enumerate(feeds) for _ in range(feed.fed)]
    found = []
    for rows in query_rows(batch, length):
        assert torch.equal(rows.tokens.flatten()[rows.places], rows.fed)
        assert len(rows.tokens) > 1, "one row alone would need another graph"
        for token, place in zip(rows.fed.tolist(), rows.places.tolist(), strict=True):
            row, step = divmod(place, rows.tokens.shape[1])
            assert rows.first[row] + step == positions[token] <= rows.last[row]
            assert rows.sequences[row] == owners[token]
            found.append(token)
    assert sorted(found) == list(range(len(positions)))


def fill_alike(backends: Sequence[TensorBackend]) -> None:
    """Fill the caches with the same random K and V."""
    for layer in range(len(backends[0].geometry.layers)):
        for part in (TensorBackend.keys, TensorBackend.values):
            contents = torch.randn(part(backends[0], layer).shape)
            for backend in backends:
                (backend.keys if part is TensorBackend.keys else backend.values)(layer).copy_(contents)


@pytest.mark.parametrize(("block_size", "window", "group"), [(1, None, 70), (2, 7, 70), (32, 16, 20), (32, 1, 1)])
def test_small_blocks_and_large_groups_uncompiled(block_size: int, window: int | None, group: int) -> None:
    make = partial(FlexBackend, compiled=False)
    case = Case(MIXED, block_size, kv_heads=1, group=group, scoring=Scoring(0.25, window), make=make)
    assert case.run() < 2e-5


def test_sequences_may_share_a_block_at_different_indices() -> None:
    """The engine never holds a block at different indices, but the mask does not rely on this."""
    geometry = CacheGeometry.uniform(2, 1, 8)
    work = [Work(1, (0,), 9, (2, 1, 3), True, Sampling()), Work(2, (0,) * 3, 4, (1, 4), True, Sampling())]
    batch = PagedBatch.of(work, 4, CPU)
    backends = [FlexBackend(geometry, 4, 5, compiled=False), TorchBackend(geometry, 4, 5)]
    query = torch.randn(4, 2, 8)
    fill_alike(backends)
    found, expected = (backend.attend(1, query, batch, Scoring(0.3)) for backend in backends)
    assert (found - expected).abs().max() < 1e-5


def test_unused_slots_of_a_new_block_hold_no_stale_v() -> None:
    backend = FlexBackend(CacheGeometry.uniform(2, 1, 2), 4, 6, compiled=False)
    backend.cache.fill_(torch.nan)
    work = [Work(1, (0,) * 3, 0, (5,), True, Sampling()), Work(2, (0,), 6, (2, 1), True, Sampling())]
    batch = PagedBatch.of([*work, Work(3, (0,) * 4, 0, (6,), True, Sampling())], 4, CPU)
    backend.write(1, *torch.ones(2, 8, 1, 2), batch)
    filled = [(1, 5, slot) for slot in range(3)] + [(1, 1, 2)] + [(1, 6, slot) for slot in range(4)]
    values = backend.values(1)[..., 0, 0]
    expected = torch.full_like(values, torch.nan)
    for _, block, slot in filled:
        expected[block, slot] = 1
    expected[5, 3] = 0  # not of block 1, which an earlier batch began
    assert torch.equal(values.nan_to_num(-1), expected.nan_to_num(-1))
    assert backend.keys(0).isnan().all(), "the other layer is unchanged"
    assert backend.values(0).isnan().all()


@pytest.mark.parametrize("sinks", [False, True])
def test_batches_of_any_size_and_windows_of_any_width_share_two_graphs(sinks: bool) -> None:
    draw = random.Random(5)
    geometry = CacheGeometry.uniform(3, 1, 16)
    backends = [FlexBackend(geometry, 8, 120), TorchBackend(geometry, 8, 120)]
    fill_alike(backends)
    backends[0].cache[0] = torch.nan
    of_layers = [torch.randn(3) if sinks else None for _ in range(3)]
    before = graphs()
    for _ in range(12):
        feeds = [Feed(draw.randrange(60), draw.choice([1, 1, 1, 2, 30])) for _ in range(draw.randrange(1, 9))]
        batch, _ = scattered(feeds, 8, draw)
        query, layer = torch.randn(int(batch.first[-1]), 3, 16), draw.randrange(3)
        scoring = Scoring(draw.uniform(0.1, 0.5), draw.choice([None, 3, 20]), sinks=of_layers[layer])
        found, expected = (backend.attend(layer, query, batch, scoring) for backend in backends)
        assert (found - expected).abs().max() < 1e-5
    assert graphs() - before == KINDS


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_without_a_compiler_the_backend_is_refused_at_start() -> None:
    with (
        torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(BackendUnavailable, match="need a C\\+\\+ compiler, but none was found"),
    ):
        FlexBackend(CacheGeometry.uniform(1, 1, 8), 16, 2)


@pytest.mark.parametrize(
    ("block_size", "blocks", "reason"),
    [(24, 2, "must be a multiple of 16 .*, not 24"), (16, 2**20, "fewer than 2..31 elements .*, not 4294971392")],
)
def test_shapes_that_the_gpu_kernels_do_not_support_are_refused(block_size: int, blocks: int, reason: str) -> None:
    with pytest.raises(BackendUnavailable, match=reason):
        FlexBackend(CacheGeometry.uniform(2, 1, 64), block_size, blocks, device=torch.device("cuda"))


class FlexEngine(ModelEngine):
    def make_backend(
        self, geometry: CacheGeometry, block_size: int, device_blocks: int, host_blocks: int
    ) -> FlexBackend:
        backend = FlexBackend(geometry, block_size, device_blocks, host_blocks=host_blocks)
        backend.cache.fill_(torch.nan)
        return backend


def test_a_model_generates_the_tokens_of_transformers_through_preemptions_with_two_graphs(
    tiny_model: Callable[[str], Path], random_prompt: Callable[[int], list[int]]
) -> None:
    before = graphs()
    folder, prompts = tiny_model("llama"), [random_prompt(length) for length in (1, 15, 16, 17, 40, 90)]
    engine = FlexEngine(folder, block_size=8, device_blocks=16, host_blocks=16, preemption=Preemption.SWAP)
    answers = engine.generate(prompts, 24)
    assert engine.scheduler.totals.preemptions > 0
    assert near_ties(folder, prompts, answers, 24) <= 1
    assert graphs() - before == KINDS
