"""Products of quantized rows and packed weights: equal to float64, for every format, size, class and team."""

from itertools import product

import numpy as np
import pytest
import torch

from engine.native.formats.grouped import GroupedWeights, TwoLevel
from engine.native.grouped_strips import pack_strips, strips_size
from engine.native.kernels import Kernels
from tests.engine import native_kernels

EPSILON = 2.0**-23
FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "int8", "Q4_K", "Q5_K", "Q6_K")
CLASSES = ("avx512-bf16", "avx2")  # no class of tiles multiplies them in another way


@pytest.fixture(scope="module", params=CLASSES)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return native_kernels.kernels(request.param)


def random_weights(kind: str, outputs: int, inputs: int) -> GroupedWeights:
    """Return weights of a format with all codes, and scales of different sizes."""
    random = np.random.default_rng(outputs * inputs)
    bits = {"int8": 8}.get(kind) or int(kind[1])
    group = {"int8": inputs, "Q6_K": 16}.get(kind, 32)
    codes = random.integers(0, 1 << bits, (outputs, inputs), dtype=np.uint8)
    shape = (outputs, inputs // group)
    scales = random.uniform(-1, 1, shape).astype(np.float16).astype(np.float32)
    minimums = random.uniform(-9, 9, shape).astype(np.float16).astype(np.float32) if kind.endswith("_1") else None
    levels = random_levels(random, kind, outputs, inputs // group, inputs // 256) if kind.endswith("_K") else None
    if levels is not None:
        units = 256 // group
        scales = np.repeat(levels.super_scales, units, axis=1) * levels.scale_codes.astype(np.float32)
        if levels.minimum_codes is not None and levels.super_minimums is not None:
            minimums = -np.repeat(levels.super_minimums, units, axis=1) * levels.minimum_codes.astype(np.float32)
    return GroupedWeights(codes, scales, minimums, 1 << (bits - 1), bits, group, levels)


def random_levels(random: np.random.Generator, kind: str, outputs: int, groups: int, supers: int) -> TwoLevel:
    def units() -> np.ndarray:
        return random.uniform(0, 1, (outputs, supers)).astype(np.float16).astype(np.float32)

    if kind == "Q6_K":
        return TwoLevel(random.integers(-128, 128, (outputs, groups), dtype=np.int8), units(), None, None)
    codes = (random.integers(0, 64, (outputs, groups), dtype=np.uint8) for _ in range(2))
    return TwoLevel(next(codes), units(), next(codes), units())


def packed(kernels: Kernels, weights: GroupedWeights, threads: int = 1) -> tuple[torch.Tensor, np.ndarray]:
    memory = kernels.zeros([strips_size(kernels, weights)], torch.uint8)
    return memory, pack_strips(kernels, weights, memory, threads)


def exact_rows(count: int, inputs: int) -> torch.Tensor:
    """Return rows that their quantization represents exactly: multiples of a power of two, the largest 127 of them."""
    random = np.random.default_rng(count + inputs)
    codes = random.integers(-127, 128, (count, inputs)).astype(np.float32)
    codes[:, ::32] = 127
    groups = np.exp2(random.integers(-4, 5, (count, -(-inputs // 32)))).astype(np.float32)
    return torch.from_numpy(codes * np.repeat(groups, 32, axis=1)[:, :inputs])


@pytest.mark.parametrize("kind", FORMATS)
def test_products_of_rows_that_need_no_rounding_are_those_of_float64(kernels: Kernels, kind: str) -> None:
    sizes = [(16, 256), (37, 512)] if kind.endswith("_K") else [(1, 32), (16, 64), (37, 96), (83, 320)]
    for (outputs, inputs), threads in product(sizes, (1, 2)):
        weights = random_weights(kind, outputs, inputs)
        memory, strips = packed(kernels, weights, threads)
        dense = weights.dense().astype(np.float64)
        for count in (1, 2, 3, 5, 7, 16, 17, 40):
            rows = exact_rows(count, inputs)
            found = kernels.multiply_grouped(strips, outputs, rows, threads).numpy()
            exact = rows.numpy().astype(np.float64) @ dense.T
            assert np.abs(found - exact).max() <= bound(rows.numpy(), weights)
        del memory


def bound(rows: np.ndarray, weights: GroupedWeights) -> float:
    """Return the most that float32 sums of all groups' sums can be wrong by: a few roundings of each group."""
    largest = np.abs(weights.codes.astype(np.float64) - (weights.zero if weights.minimums is None else 0)).max()
    scale = np.abs(weights.scales).max() * largest
    if weights.minimums is not None:
        scale += np.abs(weights.minimums).max()
    groups = rows.shape[1] / 16
    return float((groups + 4) * EPSILON * np.abs(rows).astype(np.float64).sum(axis=1).max() * scale)
