"""The least time of a workload is what its matrices, keys and values cost."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter, quantize

from bench.loads import ceiling
from bench.loads.ceiling import MachineLimits, ModelCosts, ModelSizes, PackedBytes
from engine.attention.llama_shape import LlamaShape
from tests.engine.native_kernels import kernels
from tests.reference import reference_model

COSTS = ModelCosts(layers=1000, head=200, key=10, pair=4)
READS = MachineLimits(bandwidth=1.0, operations=float("inf"))
PRODUCTS = MachineLimits(bandwidth=float("inf"), operations=1.0)


def test_a_prompt_multiplies_each_token_by_the_layers_its_last_by_the_head_and_each_pair() -> None:
    assert COSTS.least_seconds([3, 1], 1, 100, PRODUCTS) == 4 * 1000 + 2 * 200 + (6 + 1) * 4


def test_rows_without_logits_cost_only_keys_and_values_in_the_last_layer() -> None:
    costs = COSTS._replace(last=300, last_pair=1)
    every_row = COSTS.least_seconds([3, 1], 1, 100, PRODUCTS)
    assert costs.least_seconds([3, 1], 1, 100, PRODUCTS) == every_row - 2 * 300 - (1 + 2) * 1


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


def test_packed_matrices_are_read_in_their_bytes_and_multiplied_as_integers() -> None:
    packed = COSTS._replace(packed=PackedBytes(layers=300, head=60))
    assert packed.least_seconds([60, 41], 1, 100, READS) == 2 * 300 + 60
    integers = MachineLimits(bandwidth=math.inf, operations=1.0, int8_operations=2.0)
    assert packed.least_seconds([3, 1], 1, 100, integers) == (4 * 1000 + 2 * 200) / 2 + (6 + 1) * 4


def test_costs_follow_from_the_configuration_as_from_the_model(tiny_model: Callable[[str], Path]) -> None:
    folder = tiny_model("llama")
    costs = ModelCosts.of(ModelSizes.of(folder))
    assert costs == ModelCosts.of(LlamaShape.of(reference_model(folder)))
    assert 2 * costs.elements.head == costs.head


def test_packed_bytes_are_of_the_layers_matrices_and_of_the_head(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    matrix = quantize(np.zeros((4, 64), np.float32), GGMLQuantizationType.Q8_0)
    for name in ("token_embd.weight", "blk.0.attn_q.weight", "blk.1.ffn_up.weight"):
        writer.add_tensor(name, matrix, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.attn_norm.weight", np.zeros(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert PackedBytes.of(tmp_path / "model.gguf") == PackedBytes(layers=2 * 4 * 68, head=4 * 68)


def test_the_machine_is_measured_with_products_of_both_types() -> None:
    measured = kernels()
    assert measured.multiply_int8(8, 1) == 2 * measured.multiply_int8(4, 1) > 0
    limits = ceiling.measurement(measured, 5 * ceiling.MIB // 2)()
    assert all(0 < one < math.inf for one in limits)
