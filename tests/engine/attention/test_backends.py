"""All attention backends against float64 attention, with pairwise combinations of batch properties."""

import math
import random
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import combinations, product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from blocks import Copy
from engine.attention import PagedBatch, TorchBackend
from engine.attention.backend import Direction, Scoring
from engine.attention.cache import CacheGeometry
from engine.attention.flex_backend import FlexBackend
from engine.errors import ModelUnsupported
from engine.native.cpu_backend import CpuBackend
from engine.native.cpu_class import NAMES
from engine.schedule.request import Sampling
from engine.schedule.step_plan import Work
from tests.engine.native_kernels import kernels
from tests.engine.paged_case import Case, Feed, MakeBackend, Moved, naive_attention
from tests.engine.triton_case import DEVICE, make_triton_backend

uniform = CacheGeometry.uniform

LONG = [Feed(4999, 1), Feed(0, 1), Feed(300, 1), Feed(130, 20)]
DECODING = [Feed(prefix, 1) for prefix in (0, 1, 14, 15, 16, 17, 63, 64, 200, 777)]
PROMPTS = [Feed(0, 37), Feed(0, 1), Feed(33, 19), Feed(64, 64)]
PROPERTIES: dict[str, Sequence[Any]] = {
    "dtype": [torch.float32, torch.bfloat16, torch.float16],
    "block_size": [8, 16, 24, 32, 64, 128],
    "head_size": [64, 80, 96, 128],
    "heads": [(2, 1), (3, 3), (2, 4), (1, 8), (1, 20)],  # of K and V, and query heads of each
    "feeds": [LONG, DECODING, PROMPTS],
    "window": [None, 1, 50, 1000],
    "softcap": [None, 20.0],
    "poison": [math.nan, math.inf],
    "moved": [None, "copied", "swapped"],
    "sinks": [False, True],
    "value_size": [0, 48],
}
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 6e-2, torch.float16: 8e-3}


BACKENDS = ["torch", *(f"cpu {name}" for name in NAMES), "flex", "triton"]


def pairwise(properties: dict[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yield combinations that cover each pair of values of different properties, those that add most pairs first."""
    names, draw = list(properties), random.Random(1)
    places = {name: range(len(properties[name])) for name in names}
    missing = {
        ((one, i), (other, j)) for one, other in combinations(names, 2) for i, j in product(places[one], places[other])
    }
    while missing:
        rows = [{name: draw.choice(places[name]) for name in names} for _ in range(60)]
        first = min(missing)
        for row in rows:
            row.update(first)
        best = max(rows, key=lambda row: len(missing.intersection(combinations(row.items(), 2))))
        missing.difference_update(combinations(best.items(), 2))
        yield {name: properties[name][place] for name, place in best.items()}


def make_backend(name: str) -> MakeBackend:
    if name == "torch":
        return TorchBackend
    if name == "flex":
        return partial(FlexBackend, device=DEVICE, compiled=False)
    if name == "triton":
        return make_triton_backend()
    return partial(CpuBackend, kernels(name.removeprefix("cpu ")))


@pytest.fixture(params=BACKENDS)
def make(request: pytest.FixtureRequest) -> MakeBackend:
    return make_backend(request.param)


def run(make: MakeBackend, row: dict[str, Any]) -> float:
    kv_heads, group = row["heads"]
    scoring = Scoring(row["head_size"] ** -0.5, row["window"], row["softcap"])
    case = Case(
        row["feeds"],
        block_size=row["block_size"],
        kv_heads=kv_heads,
        group=group,
        head_size=row["head_size"],
        scoring=scoring,
        poison=row["poison"],
        moved=row["moved"],
        dtype=row["dtype"],
        coded=row.get("coded", False),
        sinks=row.get("sinks", False),
        value_size=row.get("value_size", 0),
        make=make,
    )
    return case.run() / TOLERANCES[row["dtype"]]


TABLE = list(pairwise(PROPERTIES))


def first_rows(count: int) -> list[dict[str, Any]]:
    """Return the rows that add most pairs, and one of each block size."""
    return [
        row
        for place, row in enumerate(TABLE)
        if place < count or row["block_size"] not in [earlier["block_size"] for earlier in TABLE[:place]]
    ]


INTERPRETED = first_rows(11)  # Triton's interpreter takes half a second a row
CASES = [
    (name, row) for row in TABLE for name in BACKENDS if name != "triton" or DEVICE.type == "cuda" or row in INTERPRETED
]


def name_of(row: dict[str, Any]) -> str:
    return "-".join(str(value if name != "feeds" else len(value)) for name, value in row.items())


@pytest.mark.parametrize(
    ("make", "row"), CASES, ids=[f"{name}-{name_of(row)}" for name, row in CASES], indirect=["make"]
)
def test_attention_over_blocks_is_attention(make: MakeBackend, row: dict[str, Any]) -> None:
    assert run(make, row) < 1


WINDOWS, CAPS = st.none() | st.integers(1, 150), st.none() | st.floats(0.5, 20)


@pytest.mark.parametrize(("make", "examples"), [("torch", 60), ("flex", 25), ("triton", 15)], indirect=["make"])
def test_any_batch_of_any_shape(make: MakeBackend, examples: int) -> None:
    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(
        feeds=st.lists(
            st.builds(Feed, st.integers(0, 300), st.sampled_from([1, 1, 1, 2, 5, 19])), min_size=1, max_size=4
        ),
        sizes=st.tuples(st.integers(1, 20), st.integers(1, 3), st.integers(1, 20), st.integers(1, 20)),
        value_size=st.integers(0, 20),
        sinks=st.booleans(),
        scoring=st.builds(Scoring, st.just(0.3), WINDOWS, CAPS, st.none()),
        poison=st.sampled_from([math.nan, math.inf, -math.inf]),
        seed=st.integers(0, 10**6),
    )
    def check(feeds: list[Feed], sizes: tuple[int, int, int, int], **given: Any) -> None:
        assert Case(feeds, *sizes, make=make, **given).run() < 2e-5

    check()


class SkipsTheLastToken(TorchBackend):
    def attend(self, layer: int, query: torch.Tensor, batch: PagedBatch, scoring: Scoring) -> torch.Tensor:
        output = torch.empty_like(query)
        output[:-1] = super().attend(layer, query, batch, scoring)[:-1]
        return output


class MovesOneBlock(TorchBackend):
    def copy_blocks(self, copies: Sequence[Copy]) -> None:
        super().copy_blocks(copies[:1])

    def swap(self, copies: Sequence[Copy], direction: Direction) -> None:
        super().swap(copies[:1], direction)


@pytest.mark.parametrize(
    ("make", "moved"),
    [(SkipsTheLastToken, None), (SkipsTheLastToken, "copied"), (MovesOneBlock, "copied"), (MovesOneBlock, "swapped")],
)
def test_the_comparison_detects_a_missing_row_and_a_missing_block(make: MakeBackend, moved: Moved | None) -> None:
    assert Case(PROMPTS, moved=moved).run() < TOLERANCES[torch.float32]
    assert Case(PROMPTS, moved=moved, make=make).run() == math.inf


@pytest.mark.skipif(DEVICE.type != "cuda", reason="there is no GPU")
@pytest.mark.parametrize("row", [row for row in TABLE if row["block_size"] % 16 == 0][:4], ids=name_of)
def test_compiled_gpu_kernels_of_flexattention_are_attention(row: dict[str, Any]) -> None:
    assert run(partial(FlexBackend, device=DEVICE), row) < 1


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_result_does_not_depend_on_how_the_work_is_split(threads: int) -> None:
    make = partial(CpuBackend, kernels(), host_blocks=0, threads=threads)
    feeds = [Feed(2000, 1), Feed(1100, 1), Feed(3, 1)]
    case = Case(feeds, kv_heads=1, group=3, head_size=64, scoring=Scoring(0.125), dtype=torch.bfloat16, make=make)
    assert case.run() < TOLERANCES[torch.bfloat16]


@pytest.mark.parametrize("make", ["torch", "cpu avx512-bf16", "cpu avx2", "triton"], indirect=True)
@pytest.mark.parametrize("dtype", PROPERTIES["dtype"], ids=str)
@pytest.mark.parametrize("geometry", [uniform(3, 2, 16), uniform(1, 1, 1), uniform(2, 3, 5)])
def test_copies_and_swaps_move_whole_blocks(make: MakeBackend, geometry: CacheGeometry, dtype: torch.dtype) -> None:
    backend = make(geometry, 3, 6, dtype, host_blocks=4)
    bits = backend.cache.view(torch.uint8)
    bits.random_(0, 256)  # includes every kind of NaN
    before = bits.clone()
    assert backend.cache[0].nbytes == geometry.block_bytes(3, dtype)
    backend.swap([Copy(2, 4), Copy(5, 1), Copy(6, 2)], Direction.DEVICE_TO_HOST)
    backend.copy_blocks([Copy(1, 2), Copy(3, 5), Copy(3, 6)])
    assert torch.equal(bits[[2, 5, 6]], before[[1, 3, 3]])
    backend.swap([Copy(4, 6), Copy(1, 4), Copy(2, 5)], Direction.HOST_TO_DEVICE)
    backend.copy_blocks([])
    assert torch.equal(bits[[6, 4, 5]], before[[2, 5, 6]])
    assert torch.equal(bits[[0, 1, 3]], before[[0, 1, 3]])


@pytest.mark.parametrize("make", ["flex", "triton"], indirect=True)
def test_tensors_may_have_the_strides_of_transformers(make: MakeBackend) -> None:
    """Transformers' K, V and queries have heads before tokens, or are slices of one product."""
    backend = make(uniform(1, 2, 16), 8, 4, torch.float32)
    batch = PagedBatch.of([Work(1, (0,) * 30, 0, (3, 1, 4, 2), True, Sampling())], 8, DEVICE)
    key = torch.randn(2, 30, 16).transpose(0, 1)
    whole = torch.randn(30, 5 * 16)
    value, query = whole[:, :32].view(30, 2, 16), torch.randn(16, 30, 4).permute(1, 2, 0)
    backend.write(0, key.to(DEVICE), value.to(DEVICE), batch)
    found = backend.attend(0, query.to(DEVICE), batch, Scoring(0.25)).cpu()
    expected = naive_attention(query.double(), key.double(), value.double(), Scoring(0.25))
    assert (found - expected).abs().max() < 2e-5


def test_an_empty_batch_has_an_empty_output(make: MakeBackend) -> None:
    backend = make(uniform(1, 2, 16), 16, 2, torch.float32)
    device = backend.cache.device
    batch = PagedBatch.of([], 16, device)
    empty = torch.empty(0, 2, 16, device=device)
    backend.write(0, empty, empty, batch)
    assert backend.attend(0, empty, batch, Scoring(0.25)).shape == (0, 2, 16)


# Blocks of 360 KiB, and of a size that is no multiple of a vector register.
@pytest.mark.parametrize(
    ("geometry", "block_size"),
    [(uniform(30, 3, 64), 16), (uniform(5, 3, 26), 3)],
    ids=["large", "odd"],
)
@pytest.mark.parametrize("threads", [1, 3])
def test_many_copies_move_each_block_to_its_destination_and_change_no_other(
    geometry: CacheGeometry, block_size: int, threads: int
) -> None:
    backend = CpuBackend(kernels(), geometry, block_size, 40, torch.bfloat16, host_blocks=30, threads=threads)
    assert backend.host_cache is not None
    device, host = backend.cache.view(torch.int16), backend.host_cache.view(torch.int16)
    device.random_()
    host.random_()
    before, host_before = device.clone(), host.clone()
    ids = random.Random(1).sample(range(1, 31), 30)
    backend.swap(
        [Copy(source, target) for source, target in zip(ids[:14], ids[14:28], strict=True)], Direction.DEVICE_TO_HOST
    )
    assert torch.equal(host[ids[14:28]], before[ids[:14]])
    assert torch.equal(host[ids[:14]], host_before[ids[:14]])
    backend.copy_blocks([Copy(source, target) for source, target in zip(ids[:14], ids[14:28], strict=True)])
    assert torch.equal(device[ids[14:28]], before[ids[:14]])
    untouched = [0, *ids[:14], *ids[28:], *range(31, 41)]
    assert torch.equal(device[untouched], before[untouched])


def test_heads_larger_than_the_kernels_support_are_refused() -> None:
    with pytest.raises(ModelUnsupported, match="head size must be at most 512 for the CPU kernels, not 528"):
        CpuBackend(kernels(), uniform(1, 1, 528), 16, 2)
