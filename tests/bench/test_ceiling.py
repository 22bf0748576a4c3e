"""The least time of a workload is what its matrices, keys and values cost."""

import pytest

from bench.loads.ceiling import MachineLimits, ModelCosts

COSTS = ModelCosts(layers=1000, head=200, key=10, pair=4)
READS = MachineLimits(bandwidth=1.0, operations=float("inf"))
PRODUCTS = MachineLimits(bandwidth=float("inf"), operations=1.0)


def test_a_prompt_multiplies_each_token_by_the_layers_its_last_by_the_head_and_each_pair() -> None:
    assert COSTS.least_seconds([3, 1], 1, 100, PRODUCTS) == 4 * 1000 + 2 * 200 + (6 + 1) * 4


def test_prompts_read_the_layers_once_in_each_step() -> None:
    assert COSTS.least_seconds([60, 41], 1, 100, READS) == 2 * 1000 + 200


@pytest.mark.parametrize(
    ("limits", "first", "second"),
    [
        (READS, 1200 + (3 + 1 + 2) * 10, 1200 + (3 + 1 + 4) * 10),
        (PRODUCTS, 2 * 1200 + 6 * 4, 2 * 1200 + 8 * 4),
    ],
)
def test_each_further_token_costs_all_matrices_and_its_context(
    limits: MachineLimits, first: float, second: float
) -> None:
    prompts = COSTS.least_seconds([3, 1], 1, 100, limits)
    assert COSTS.least_seconds([3, 1], 2, 100, limits) - prompts == first
    assert COSTS.least_seconds([3, 1], 3, 100, limits) - prompts == first + second


def test_a_step_takes_the_longer_of_reads_and_products() -> None:
    assert COSTS.least_seconds([1], 1, 100, MachineLimits(1.0, 1.0)) == 1000 + 200 + 4
    assert COSTS.least_seconds([1], 1, 100, MachineLimits(1.0, 2.0)) == 1200
