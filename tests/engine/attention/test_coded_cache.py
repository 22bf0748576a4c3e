"""A KV cache in 8 bits: attention over it, and its codes."""

import math
import random
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blocks import Copy, blocks_for
from engine.attention import PagedBatch, TorchBackend
from engine.attention.backend import Direction, Scoring
from engine.attention.cache import CacheGeometry
from engine.attention.codes import decode, encode, packed, unpacked
from engine.native.cpu_backend import CpuBackend
from engine.native.cpu_class import NAMES
from engine.schedule.request import Sampling
from engine.schedule.step_plan import Work
from tests.engine.attention.test_backends import CAPS, DECODING, PROMPTS, WINDOWS, first_rows, name_of, run
from tests.engine.native_kernels import kernels
from tests.engine.paged_case import CachedBackend, Case, Feed, MakeBackend

uniform = CacheGeometry.uniform

BACKENDS = ["torch", *(f"cpu {name}" for name in NAMES)]
# Of 80 elements drawn from a normal distribution of deviation 2.
UNCODED_TOLERANCE = 0.2


def torch_backend(
    geometry: CacheGeometry, block_size: int, blocks: int, dtype: torch.dtype, /, *, host_blocks: int = 0
) -> CachedBackend:
    del dtype  # the backend decodes to float32
    return TorchBackend(geometry, block_size, blocks, torch.int8, host_blocks=host_blocks)


def make_backend(name: str) -> MakeBackend:
    if name == "torch":
        return torch_backend
    return partial(CpuBackend, kernels(name.removeprefix("cpu ")), kv_dtype=torch.int8)


@pytest.fixture(params=BACKENDS)
def make(request: pytest.FixtureRequest) -> MakeBackend:
    return make_backend(request.param)


ROWS = first_rows(9)


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_attention_over_codes_is_attention_over_what_they_stand_for(make: MakeBackend, row: dict[str, object]) -> None:
    assert run(make, row | {"coded": True}) < 1


@pytest.mark.parametrize("scoring", [Scoring(0.111), Scoring(0.111, 200, 20.0)], ids=["plain", "capped"])
def test_codes_change_attention_by_little(make: MakeBackend, scoring: Scoring) -> None:
    feeds = [*DECODING, *PROMPTS]
    case = Case(feeds, head_size=80, scoring=scoring, dtype=torch.bfloat16, coded=True, make=make)
    found, drawn = case.attend()
    errors = (found - drawn.expected(scoring)).abs()
    assert errors.max() < UNCODED_TOLERANCE
    assert errors.mean() < UNCODED_TOLERANCE / 10


@pytest.mark.parametrize("make", ["torch", "cpu avx512-bf16", "cpu avx2"], indirect=True)
def test_any_batch_of_any_shape(make: MakeBackend) -> None:
    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(
        feeds=st.lists(
            st.builds(Feed, st.integers(0, 200), st.sampled_from([1, 1, 1, 2, 5, 19])), min_size=1, max_size=3
        ),
        sizes=st.tuples(st.integers(1, 20), st.integers(1, 3), st.integers(1, 20), st.integers(1, 20)),
        scoring=st.builds(Scoring, st.just(0.3), WINDOWS, CAPS, st.none()),
        seed=st.integers(0, 10**6),
    )
    def check(feeds: list[Feed], sizes: tuple[int, int, int, int], scoring: Scoring, seed: int) -> None:
        assert Case(feeds, *sizes, scoring, seed=seed, coded=True, make=make).run() < 5e-5

    check()


def heads_of_every_kind(tokens: int, kv_heads: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return random heads, among them heads of zeros, of small and large numbers, and with an infinity and a NaN."""
    heads = torch.randn(tokens, kv_heads, size, generator=torch.Generator().manual_seed(7)) * 3
    heads[0] = 0.0
    heads[1] *= 1e-6
    heads[2] *= 1e-40
    heads[3] *= 1e4
    heads[4, 0, 3] = math.inf
    heads[5, 0, 2] = math.nan
    heads[6, 0, :2] = torch.tensor([1.0, -1.0])
    return heads.to(dtype)


def codes_of(backend: CpuBackend, table: list[int], pairs: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes of a table's blocks, `[2, slots, kv_heads, head_size]`, and their scales, `[2, slots, kv_heads]`."""
    (heads, size), slots = backend.geometry.layers[0][:2], backend.block_size
    parts = torch.stack([part.of(backend.cache)[table] for part in backend.layout.parts[0]], dim=1)
    codes, scales = parts[..., : slots * size], parts[..., slots * size :].contiguous().view(torch.bfloat16)
    shape = (len(table), heads, slots, size)
    if slots % 16 or size % 16:
        keys, values = (codes[:, part].reshape(shape) for part in range(2))
    elif pairs:
        keys = codes[:, 0].reshape(len(table), heads, slots // 16, size // 2, 16, 2).transpose(3, 4).reshape(shape)
        values = codes[:, 1].reshape(len(table), heads, slots // 2, size, 2).transpose(3, 4).reshape(shape)
    else:
        keys = codes[:, 0].reshape(len(table), heads, slots // 16, size, 16).transpose(3, 4).reshape(shape)
        values = codes[:, 1].reshape(shape)
    both = torch.stack([keys, values]).transpose(2, 3).flatten(1, 2)
    return both, scales.transpose(0, 1).transpose(2, 3).flatten(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("block_size", "size"), [(16, 32), (32, 80), (5, 7), (16, 8)])
@pytest.mark.parametrize("name", NAMES)
def test_kernels_store_the_codes_of_the_reference_whatever_is_written_together(
    name: str, block_size: int, size: int, dtype: torch.dtype
) -> None:
    tokens = 40
    key, value = (
        one.flip(0) if place else one for place, one in enumerate([heads_of_every_kind(tokens, 2, size, dtype)] * 2)
    )
    table = random.Random(1).sample(range(1, 12), -(-tokens // block_size))
    for chunk in (tokens, 7, 1):
        backend = CpuBackend(kernels(name), uniform(1, 2, size), block_size, 12, dtype, kv_dtype=torch.int8)
        for start in range(0, tokens, chunk):
            count = min(chunk, tokens - start)
            work = Work(1, (0,) * count, start, tuple(table), True, Sampling())
            batch = PagedBatch.of([work], block_size, torch.device("cpu"))
            backend.write(0, key[start : start + count], value[start : start + count], batch)
        codes, scales = codes_of(backend, table, pairs=dtype == torch.bfloat16)
        for part, heads in enumerate((key, value)):
            expected = encode(heads)
            finite = expected.scales.isfinite()
            assert torch.equal(codes[part, :tokens][finite], expected.codes[finite])
            assert torch.equal(scales[part, :tokens][finite], expected.scales[finite])
            assert not scales[part, :tokens][~finite].isfinite().any()


def attention(
    backend: CpuBackend, queries: torch.Tensor, feeds: Sequence[tuple[int, int]], scoring: Scoring
) -> torch.Tensor:
    """Attend with the tokens of one sequence: `feeds` are the first of each batch's parts, and how many it has."""
    table = tuple(range(1, len(backend.cache)))
    work = [
        Work(number, (0,) * count, start, table[: blocks_for(start + count, backend.block_size)], True, Sampling())
        for number, (start, count) in enumerate(feeds)
    ]
    fed = torch.cat([queries[start : start + count] for start, count in feeds])
    return backend.attend(0, fed, PagedBatch.of(work, backend.block_size, torch.device("cpu")), scoring)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("block_size", "scoring"),
    [(16, Scoring(0.2)), (16, Scoring(0.2, 300)), (16, Scoring(0.2, 700, 20.0)), (5, Scoring(0.2))],
)
@pytest.mark.parametrize("name", NAMES)
def test_the_attention_of_a_token_does_not_depend_on_the_batch(
    name: str, block_size: int, scoring: Scoring, dtype: torch.dtype
) -> None:
    tokens, geometry = 1300, uniform(1, 2, 32)
    draw = torch.Generator().manual_seed(1)
    queries, keys, values = (torch.randn(tokens, heads, 32, generator=draw).to(dtype) for heads in (6, 2, 2))
    places = [1299, 3, 511, 512, 700, 1023, 1024, 1110]
    batches = [[(place, 1)] for place in places] + [
        [(place, 1) for place in places],
        [(500, 40), (1299, 1), (1000, 99)],
    ]
    expected: torch.Tensor | None = None
    for threads in (1, 2, 3):
        sizes = (block_size, blocks_for(tokens, block_size) + 1, dtype)
        backend = CpuBackend(kernels(name), geometry, *sizes, threads=threads, kv_dtype=torch.int8)
        table = tuple(range(1, len(backend.cache)))
        whole = PagedBatch.of([Work(1, (0,) * tokens, 0, table, True, Sampling())], block_size, torch.device("cpu"))
        backend.write(0, keys, values, whole)
        found = backend.attend(0, queries, whole, scoring)
        expected = found if expected is None else expected
        assert torch.equal(found, expected)
        for feeds in batches:
            parts = torch.cat([expected[start : start + count] for start, count in feeds])
            assert torch.equal(attention(backend, queries, feeds, scoring), parts), (threads, feeds)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=8), st.sampled_from([1e-30, 1.0, 1e30]))
def test_codes_are_within_half_a_step_of_the_elements(numbers: list[float], unit: float) -> None:
    heads = torch.tensor(numbers) * unit
    codes = encode(heads)
    step = codes.scales.double()
    least = 2e-36  # numbers whose scale would be subnormal are 0 on threads that flush these
    assert (decode(codes).double() - heads.double()).abs().max() <= step * 0.5001 + least
    assert step <= heads.abs().max().double() / 127 * 1.004
    again = unpacked(packed(codes))
    assert torch.equal(again.codes, codes.codes)
    assert torch.equal(again.scales, codes.scales)


@pytest.mark.parametrize(("geometry", "block_size"), [(uniform(3, 2, 16), 16), (uniform(2, 3, 5), 3)])
def test_a_block_has_its_codes_and_scales_only(make: MakeBackend, geometry: CacheGeometry, block_size: int) -> None:
    backend = make(geometry, block_size, 4, torch.bfloat16)
    (heads, size), tokens = geometry.layers[0][:2], 2 * len(geometry.layers) * block_size
    assert backend.cache[0].nbytes == geometry.block_bytes(block_size, torch.int8) == tokens * heads * (size + 2)


def test_copies_and_swaps_move_codes_and_scales(make: MakeBackend) -> None:
    backend = make(uniform(2, 3, 5), 3, 6, torch.bfloat16, host_blocks=4)
    backend.cache.random_(-128, 128)
    before = backend.cache.clone()
    backend.swap([Copy(2, 4), Copy(5, 1)], Direction.DEVICE_TO_HOST)
    backend.copy_blocks([Copy(1, 2), Copy(3, 5)])
    backend.swap([Copy(4, 6), Copy(1, 4)], Direction.HOST_TO_DEVICE)
    assert torch.equal(backend.cache[[2, 5, 6, 4]], before[[1, 3, 2, 5]])
    assert torch.equal(backend.cache[[0, 1, 3]], before[[0, 1, 3]])
