"""Every attention backend equals attention in float64, over the whole grid of which test_backends.py tests pairs.

All properties are combined except some that are drawn for each row: poison, because its kind does not affect its
position, sinks, and another size of V. Without a GPU the backends for GPUs run a sample with a fixed seed.
"""

import random
from collections.abc import Iterator
from itertools import count, product
from typing import Any

import pytest
import torch

from engine.attention.flex_backend import FlexBackend
from tests.acceptance.conftest import Record
from tests.engine.attention import test_backends
from tests.engine.attention.test_backends import PROPERTIES, run
from tests.engine.paged_case import MakeBackend

# One row in this many for slow backends: Triton's interpreter takes a second for each. All others run all rows.
SAMPLES = {"flex": 8, "triton": 60}
# Properties that all rows of a test share; the others vary. Rows with equal feeds and scoring are adjacent, because
# they share the float64 reference.
SHARED = ("dtype", "head_size", "heads")
WITHIN = ("feeds", "window", "softcap", "block_size", "moved")
DRAWN = ("poison", "sinks", "value_size")

make = test_backends.make


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def rows_of(shared: dict[str, Any], part: int) -> Iterator[dict[str, Any]]:
    """Yield one in `part` rows; which ones depends on the shared properties too."""
    draw = random.Random(repr(shared))
    for number, values in zip(count(), product(*(PROPERTIES[name] for name in WITHIN)), strict=False):
        if part == 1 or draw.randrange(part) == 0:
            of_row = random.Random(number)
            drawn = {name: of_row.choice(PROPERTIES[name]) for name in DRAWN}
            yield {**shared, **dict(zip(WITHIN, values, strict=True)), **drawn}


def test_the_grid_has_every_property() -> None:
    assert {*SHARED, *WITHIN, *DRAWN} == set(PROPERTIES)
    rows = list(rows_of({}, 1))
    for name, drawn in product(WITHIN, DRAWN):
        pairs = {(str(row[name]), str(row[drawn])) for row in rows}
        assert len(pairs) == len(PROPERTIES[name]) * len(PROPERTIES[drawn]), "each value is combined with each drawn"


@pytest.mark.parametrize("heads", PROPERTIES["heads"], ids=str)
@pytest.mark.parametrize("head_size", PROPERTIES["head_size"])
@pytest.mark.parametrize("dtype", PROPERTIES["dtype"], ids=str)
def test_paged_attention_equals_attention_over_contiguous_memory(
    make: MakeBackend,
    dtype: torch.dtype,
    head_size: int,
    heads: tuple[int, int],
    record: Record,
    request: pytest.FixtureRequest,
) -> None:
    name = request.node.callspec.params["make"]
    part = 1 if torch.cuda.is_available() else SAMPLES.get(name, 1)
    errors = []
    for row in rows_of(dict(zip(SHARED, (dtype, head_size, heads), strict=True)), part):
        errors.append(run(make, row))
        assert errors[-1] < 1, row
    record(rows=len(errors), worst_error_of_tolerance=round(max(errors, default=0), 3))


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("row", test_backends.TABLE, ids=test_backends.name_of)
def test_compiled_flexattention_equals_attention(row: dict[str, Any], record: Record) -> None:
    error = run(FlexBackend, row)
    torch._dynamo.reset()
    record(error_of_tolerance=round(error, 3))
    assert error < 1
