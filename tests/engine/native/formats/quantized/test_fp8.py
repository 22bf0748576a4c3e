"""Matrices in floats of 8 bits, of transformers, FBGEMM and ModelOpt, and ModelOpt's NVFP4: their values."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.native.formats.coded import ALL, CodedMatrix
from engine.native.formats.quantized.methods import METHODS
from engine.native.formats.quantized.scheme import Matrices
from tests.engine.native.formats.quantized.compressed_writers import (
    by_block,
    float8,
    float_scales,
    numbers,
    write_float4,
)
from tests.engine.native.formats.quantized.parts_in_memory import (
    MODULE,
    Floats,
    InMemory,
    check_exact,
    codes_of,
    matrices_of,
    stored_parts,
)

SEEDS = st.integers(0, 2**32 - 1)
TYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.float8_e8m0fnu])
EXPERTS = "model.layers.3.mlp.experts"


@given(
    seed=SEEDS,
    outputs=st.integers(1, 9),
    inputs=st.integers(1, 20),
    block=st.tuples(st.integers(1, 12), st.integers(1, 24)),
    dtype=TYPES,
)
def test_blocks_at_the_edges_may_be_smaller(
    seed: int, outputs: int, inputs: int, block: tuple[int, int], dtype: torch.dtype
) -> None:
    random = np.random.default_rng(seed)
    weight = float8(random, outputs, inputs)
    scales = float_scales(random, (-(-outputs // block[0]), -(-inputs // block[1])), dtype)
    fields = {"weight_block_size": list(block)}
    codes = codes_of("fp8", fields, {"weight": weight, "weight_scale_inv": scales})
    check_exact(codes, by_block(weight, numbers(scales), block), form=None)


def test_blocks_have_128_outputs_and_inputs_unless_declared() -> None:
    random = np.random.default_rng(0)
    weight, scales = float8(random, 130, 257), float_scales(random, (2, 3), torch.float32)
    codes = codes_of("fp8", {}, {"weight": weight, "weight_scale_inv": scales})
    check_exact(codes, by_block(weight, numbers(scales), (128, 128)), form=None)


@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("fields", [{}, {"weight_block_size": None}, {"weight_block_size": [128, 128]}])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (150,), (150, 1)])
def test_one_scale_is_for_all_weights_and_others_are_for_outputs(
    suffix: str, fields: dict[str, Any], shape: tuple[int, ...]
) -> None:
    random = np.random.default_rng(0)
    weight, scales = float8(random, 150, 24), float_scales(random, shape, torch.float32)
    codes = codes_of("fp8", fields, {"weight": weight, suffix: scales, "input_scale": torch.ones(1)})
    full = np.broadcast_to(numbers(scales).reshape(-1, 1), (150, 1))
    check_exact(codes, by_block(weight, full, (1, 24)), form=None)


def test_fbgemm_has_a_scale_for_each_output() -> None:
    random = np.random.default_rng(0)
    weight, scales = float8(random, 5, 24), float_scales(random, (5, 1), torch.float32)
    codes = codes_of("fbgemm_fp8", {}, {"weight": weight, "weight_scale": scales, "input_scale_ub": torch.ones(1)})
    check_exact(codes, by_block(weight, numbers(scales), (1, 24)), form=None)


def test_a_scale_of_a_block_is_read_once_for_its_outputs() -> None:
    """A large matrix is decoded in pieces, of which each reads its own rows of scales."""
    random = np.random.default_rng(0)
    stored = stored_parts(
        {"weight": float8(random, 512, 128), "weight_scale_inv": float_scales(random, (4, 1), torch.float32)}
    )
    codes = matrices_of("fp8", {}, stored).coded[f"{MODULE}.weight"].codes
    codes.values(100, 140)
    assert stored[f"{MODULE}.weight"].read == 40 * 128
    assert stored[f"{MODULE}.weight_scale_inv"].read == 2 * 4


@pytest.mark.parametrize(
    ("fields", "label"),
    [
        ({"weight_block_size": [128, 128]}, "fp8 128x128"),
        ({"weight_block_size": None}, "fp8"),
        ({"ignored_layers": ["lm_head"], "activation_scheme": "static"}, "fp8"),
    ],
)
def test_a_label_has_the_declared_block(fields: dict[str, Any], label: str) -> None:
    assert METHODS["fp8"](fields).label == label


class Stacked:
    """The tensors of a layer's experts, and the matrices of each by the names of single ones."""

    def __init__(
        self, experts: int, inner: int, hidden: int, block: tuple[int, int] | None, *, transposed: bool
    ) -> None:
        random = np.random.default_rng(experts)
        self.stored: dict[str, InMemory] = {}
        self.values: dict[str, Floats] = {}
        for part, sides in (("gate_up_proj", (2 * inner, hidden)), ("down_proj", (hidden, inner))):
            shape = sides[::-1] if transposed else sides
            size = block or shape
            weight = float8(random, experts, *shape)
            scales = float_scales(random, (experts, -(-shape[0] // size[0]), -(-shape[1] // size[1])), torch.float32)
            self.stored |= {f"{EXPERTS}.{part}": InMemory(weight), f"{EXPERTS}.{part}_scale_inv": InMemory(scales)}
            for expert in range(experts):
                one = by_block(weight[expert], numbers(scales[expert]), size)
                self._add(expert, part, one.T if transposed else one)

    def _add(self, expert: int, part: str, values: Floats) -> None:
        names = ("gate", "up") if part == "gate_up_proj" else ("down",)
        halves = np.split(values, len(names))
        self.values |= {f"{EXPERTS}.{expert}.{name}_proj.weight": one for name, one in zip(names, halves, strict=True)}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("block", [(16, 32), (32, 16), (24, 10), None])
def test_experts_in_one_tensor_have_a_matrix_each(block: tuple[int, int] | None, transposed: bool) -> None:
    written = Stacked(3, 24, 40, block, transposed=transposed)
    found = matrices_of("fp8", {"weight_block_size": block and list(block)}, written.stored)
    assert found.parts == set(written.stored)
    assert found.coded.keys() == written.values.keys()
    for name, values in written.values.items():
        check_exact(found.coded[name].codes, values, form=None)


def test_experts_have_their_place_in_the_tensor_of_all() -> None:
    written = Stacked(3, 24, 40, (16, 32), transposed=False)
    found = matrices_of("fp8", {"weight_block_size": [16, 32]}, written.stored)
    places = {name.rpartition(f"{EXPERTS}.")[2]: one.place for name, one in found.coded.items()}
    up, down = places["2.up_proj.weight"], places["1.down_proj.weight"]
    assert up is not None
    assert down is not None
    assert (up.expert, up.outputs, up.transposed) == (2, range(24, 48), False)
    assert (down.expert, down.outputs, down.transposed) == (1, range(40), False)


def test_gates_and_ups_within_one_block_have_a_scale_each() -> None:
    """transformers gives the two halves two scales at least."""
    random = np.random.default_rng(0)
    weight, scales = float8(random, 2, 48, 40), float_scales(random, (2, 2, 1), torch.float32)
    for fields in ({"weight_block_size": None}, {"weight_block_size": [128, 128]}):
        stored = Stacked(2, 24, 40, None, transposed=False).stored
        stored[f"{EXPERTS}.gate_up_proj"] = InMemory(weight)
        stored[f"{EXPERTS}.gate_up_proj_scale_inv"] = InMemory(scales)
        found = matrices_of("fp8", fields, stored)
        expected = by_block(weight[1], numbers(scales[1]), (24, 40))
        check_exact(found.coded[f"{EXPERTS}.1.gate_proj.weight"].codes, expected[:24], form=None)
        check_exact(found.coded[f"{EXPERTS}.1.up_proj.weight"].codes, expected[24:], form=None)


NVFP4 = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}


@given(seed=SEEDS, outputs=st.integers(1, 9), groups=st.integers(1, 6), shape=st.sampled_from([(), (1,)]))
def test_nvfp4_of_modelopt_multiplies_its_scales_by_that_of_all(
    seed: int, outputs: int, groups: int, shape: tuple[int, ...]
) -> None:
    random = np.random.default_rng(seed)
    packed, scales, products = write_float4(random, (outputs, 16 * groups), 16)
    of_all = torch.full(shape, float(np.exp2(random.uniform(-12, 4))))
    parts = {"weight": packed, "weight_scale": scales, "weight_scale_2": of_all, "input_scale": torch.ones(())}
    codes = codes_of("modelopt", NVFP4, parts)
    found = codes.values(0, outputs)
    np.testing.assert_allclose(found, products * of_all.numpy(), rtol=3e-7)
    check_exact(codes, found, form=None if groups % 2 else (4, 16, False, True, True, False))


@pytest.mark.parametrize("declared", [{"quant_algo": "FP8"}, {"quantization": {"quant_algo": "FP8"}}])
def test_floats_of_8_bits_of_modelopt_have_one_scale(declared: dict[str, Any]) -> None:
    random = np.random.default_rng(0)
    weight, scales = float8(random, 6, 40), float_scales(random, (), torch.float32)
    codes = codes_of("modelopt", declared, {"weight": weight, "weight_scale": scales, "input_scale": torch.ones(())})
    check_exact(codes, by_block(weight, numbers(scales).reshape(1, 1), (6, 40)), form=None)


def test_blocks_of_modelopt_have_four_dimensions() -> None:
    random = np.random.default_rng(0)
    weight, scales = float8(random, 200, 257), float_scales(random, (2, 1, 3, 1), torch.float32)
    codes = codes_of("modelopt", {"quant_algo": "fp8_pb_wo"}, {"weight": weight, "weight_scale": scales})
    check_exact(codes, by_block(weight, numbers(scales)[:, 0, :, 0], (128, 128)), form=None)


def mixed() -> Matrices:
    random = np.random.default_rng(0)
    packed, scales, _ = write_float4(random, (4, 32), 16)
    stored = stored_parts({"weight": packed, "weight_scale": scales, "weight_scale_2": torch.ones(())}, "model.a")
    stored |= stored_parts({"weight": float8(random, 4, 32), "weight_scale": torch.ones(())}, "model.b")
    stored |= stored_parts({"weight": torch.ones(4, 32)}, "model.c")
    layers = {"model.a": {"quant_algo": "NVFP4"}, "model.b": {"quant_algo": "FP8"}}
    return matrices_of("modelopt", {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}, stored)


def test_modelopt_mixes_formats_and_dense_modules() -> None:
    found = mixed()
    assert found.coded.keys() == {"model.a.weight", "model.b.weight"}
    packs = {name: CodedMatrix(one.codes, torch.float32).grouped(ALL) is not None for name, one in found.coded.items()}
    assert packs == {"model.a.weight": True, "model.b.weight": False}
