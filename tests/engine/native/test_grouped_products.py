"""Products of quantized rows and packed weights: equal to float64, for every format, size, class and team."""

from itertools import product

import numpy as np
import pytest
import torch

from engine.native.formats.grouped import GroupedWeights
from engine.native.grouped_strips import FORMATS, format_of, pack_strips, packed_bytes, strips_size
from engine.native.kernels import Kernels
from tests.engine import native_kernels
from tests.engine.grouped_weights import KINDS, in_groups_of_32, random_weights, step_of

EPSILON = 2.0**-23
CLASSES = ("avx512-bf16", "avx2")  # no class of tiles multiplies them in another way
COUNTS = (1, 2, 3, 5, 7, 16, 17, 40)
SIZES = {1: [(16, 33), (37, 100)], 256: [(16, 256), (37, 512)]}
OTHER_SIZES = [(1, 32), (16, 64), (37, 96), (83, 320)]


@pytest.fixture(scope="module", params=CLASSES)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return native_kernels.kernels(request.param)


def packed(kernels: Kernels, weights: GroupedWeights, threads: int = 1) -> tuple[torch.Tensor, np.ndarray]:
    memory = kernels.zeros([strips_size(kernels, weights)], torch.uint8)
    return memory, pack_strips(kernels, weights, memory, threads)


def sizes_of(kind: str) -> list[tuple[int, int]]:
    return SIZES.get(step_of(kind), []) + (OTHER_SIZES if step_of(kind) < 256 else [])


def exact_rows(count: int, inputs: int) -> torch.Tensor:
    """Return rows that their quantization represents exactly: multiples of a power of two, the largest 127 of them."""
    random = np.random.default_rng(count + inputs)
    codes = random.integers(-127, 128, (count, inputs)).astype(np.float32)
    codes[:, ::32] = 127
    groups = np.exp2(random.integers(-4, 5, (count, -(-inputs // 32)))).astype(np.float32)
    return torch.from_numpy(codes * np.repeat(groups, 32, axis=1)[:, :inputs])


@pytest.mark.parametrize("kind", KINDS)
def test_products_of_rows_that_need_no_rounding_are_those_of_float64(kernels: Kernels, kind: str) -> None:
    for (outputs, inputs), threads in product(sizes_of(kind), (1, 2)):
        weights = random_weights(kind, outputs, inputs)
        memory, strips = packed(kernels, weights, threads)
        for count in COUNTS:
            rows = exact_rows(count, inputs)
            found = kernels.multiply_grouped(strips, outputs, rows, threads).numpy()
            assert error_of(found, rows, weights) <= bound(rows.numpy(), weights)
        del memory


def error_of(found: np.ndarray, rows: torch.Tensor, weights: GroupedWeights) -> float:
    exact = rows.numpy().astype(np.float64) @ weights.dense().astype(np.float64).T
    return float(np.abs(found - exact).max())


def bound(rows: np.ndarray, weights: GroupedWeights) -> float:
    """Return the most that float32 sums of all groups' sums can be wrong by: a few roundings of each group."""
    numbers = weights.codes.astype(np.float64) - (weights.zero if weights.minimums is None else 0)
    if weights.zeros is not None:
        numbers = weights.codes.astype(np.float64) - np.repeat(weights.zeros, weights.group, axis=1)
    if weights.table is not None:
        numbers = weights.table.astype(np.float64)
    scale = np.abs(weights.scales).max() * np.abs(numbers).max()
    if weights.minimums is not None:
        scale += np.abs(weights.minimums).max()
    groups = rows.shape[1] / 16
    return float((groups + 4) * EPSILON * np.abs(rows).astype(np.float64).sum(axis=1).max() * scale)


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_numbers_do_not_overflow(kernels: Kernels, kind: str) -> None:
    """Some kernels add products in 16 bits."""
    outputs, inputs = 16, max(64, step_of(kind))
    weights = random_weights(kind, outputs, inputs)
    for code in range(1 << weights.bits) if weights.bits < 8 else (0, 1, 127, 128, 255):
        same = weights._replace(codes=np.full((outputs, inputs), code, dtype=np.uint8))
        memory, strips = packed(kernels, same)
        rows = torch.full((3, inputs), 127.0) * torch.tensor([[1.0], [-1.0], [1.0]])
        rows[2, ::2] = -127.0
        found = kernels.multiply_grouped(strips, outputs, rows, 1).numpy()
        assert error_of(found, rows, same) <= bound(rows.numpy(), weights)
        del memory


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_an_embedding_are_exactly_those_of_its_weights(kernels: Kernels, kind: str) -> None:
    for outputs, inputs in sizes_of(kind):
        weights = random_weights(kind, outputs, inputs)
        order = np.random.default_rng(inputs).permutation(inputs)
        ordered = weights._replace(order=order)
        memory, strips = packed(kernels, weights)
        for output in {0, outputs // 2, outputs - 1}:
            assert np.array_equal(kernels.read_grouped(strips, inputs, output), weights.dense()[output])
            found = kernels.read_grouped(strips, inputs, output, order.astype(np.int32))
            assert np.array_equal(found, ordered.dense()[output])
        del memory


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_multiplied_alike_alone_and_with_others(kernels: Kernels, kind: str) -> None:
    outputs, inputs = 37, 2 * step_of(kind) if step_of(kind) > 1 else 100
    memory, strips = packed(kernels, random_weights(kind, outputs, inputs))
    rows = torch.randn(40, inputs, generator=torch.Generator().manual_seed(1))
    together = kernels.multiply_grouped(strips, outputs, rows, 2)
    for row in (0, 5, 17, 39):
        assert torch.equal(kernels.multiply_grouped(strips, outputs, rows[row : row + 1].clone(), 2)[0], together[row])
    del memory


def test_strips_of_different_formats_are_multiplied_at_once(kernels: Kernels) -> None:
    """As of pieces of one matrix whose scales have different ranges."""
    parts = [random_weights(kind, 16, 64) for kind in ("AWQ", "W4A16 asymmetric", "NVFP4", "NVFP4", "int4")]
    memories, strips = zip(*(packed(kernels, one) for one in parts), strict=True)
    rows = exact_rows(9, 64)
    found = kernels.multiply_grouped(np.concatenate(strips), 80, rows, 1).numpy()
    for number, weights in enumerate(parts):
        assert error_of(found[:, number * 16 : number * 16 + 16], rows, weights) <= bound(rows.numpy(), weights)
    del memories


@pytest.mark.parametrize("kind", KINDS)
def test_packed_bytes_are_those_of_the_kernels(kernels: Kernels, kind: str) -> None:
    for outputs, inputs in sizes_of(kind):
        weights = random_weights(kind, outputs, inputs)
        assert packed_bytes(weights) == packed_bytes(weights._replace(codes=weights.codes), outputs)
        assert packed_bytes(weights) == strips_size(kernels, weights)


def test_every_format_has_the_size_that_the_kernels_give_it(kernels: Kernels) -> None:
    for number, one in enumerate(FORMATS):
        for inputs in (1, 16, 32, 33, 96, 256, 2048, 2304, 14336):
            assert one.strip_bytes(inputs) == kernels.strip_bytes(number, inputs)


def test_scales_that_files_repeat_are_packed_once(kernels: Kernels) -> None:
    weights = random_weights("IQ4_XS", 16, 512)
    assert format_of(weights) == format_of(in_groups_of_32(weights))
    (first, _), (other, _) = packed(kernels, weights), packed(kernels, in_groups_of_32(weights))
    assert torch.equal(first, other)
