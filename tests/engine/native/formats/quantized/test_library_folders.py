"""Folders that the formats' own libraries wrote: matrices equal those that these libraries dequantize."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.native.formats.coded import CodedMatrix
from engine.native.formats.quantized.methods import scheme_of
from engine.native.formats.stored import files_of
from tests.engine.native.formats.quantized.twins import dequantized
from tests.engine.native.formats.quantized.twins_compressed import METHODS, declaration
from tests.engine.native.formats.quantized.twins_experts import METHODS as METHODS_OF_EXPERTS

FOLDERS = Path(__file__).parents[4] / "data" / "quantized"
LABELS = {
    "bitsandbytes-fp4": "bitsandbytes fp4",
    "bitsandbytes-int8": "bitsandbytes int8",
    "bitsandbytes-int8-experts": "bitsandbytes int8",
    "bitsandbytes-nf4": "bitsandbytes nf4",
    "bitsandbytes-nf4-bfloat16": "bitsandbytes nf4",
    "bitsandbytes-nf4-double": "bitsandbytes nf4",
    "compressed-fp8-block": "compressed-tensors fp8 128x128",
    "compressed-fp8-channel": "compressed-tensors fp8",
    "compressed-fp8-tensor": "compressed-tensors fp8",
    "compressed-mixed": "compressed-tensors fp8 + w4a16 g32 + w8a16",
    "compressed-mxfp4": "compressed-tensors mxfp4",
    "compressed-mxfp8": "compressed-tensors mxfp8",
    "compressed-nvfp4": "compressed-tensors nvfp4",
    "compressed-w4a16-act-order": "compressed-tensors w4a16 g32 act-order",
    "compressed-w4a16-channel-asym": "compressed-tensors w4a16",
    "compressed-w4a16-g32": "compressed-tensors w4a16 g32",
    "compressed-w4a16-g64-asym": "compressed-tensors w4a16 g64",
    "compressed-w8a16-channel": "compressed-tensors w8a16",
    "compressed-w8a16-g32-asym": "compressed-tensors w8a16 g32",
    "compressed-w8a8": "compressed-tensors w8a8",
    "fp8-blocks": "fp8 32x64",
    "fp8-experts": "fp8 32x32",
    "fp8-stacked-experts": "fp8 16x32",
    "fp8-tensor": "fp8",
    "modelopt-fp8": "modelopt fp8",
    "modelopt-fp8-block": "modelopt fp8 128x128",
    "modelopt-fp8-channel": "modelopt fp8",
    "modelopt-nvfp4": "modelopt nvfp4",
    "mxfp4": "mxfp4",
}
# Of bitsandbytes' tables of floats, which no kernel has.
IN_FLOATS = [f"bitsandbytes-{kind}" for kind in ("fp4", "nf4", "nf4-double", "nf4-bfloat16")]


def matrices(folder: Path) -> dict[str, CodedMatrix]:
    handles = {name: file.get_slice(name) for name, file in files_of(folder, torch.float32).items()}
    return {name: one for name, one in handles.items() if isinstance(one, CodedMatrix)}


@pytest.mark.parametrize("name", LABELS)
def test_matrices_are_those_that_the_library_dequantizes(name: str) -> None:
    expected = json.loads((FOLDERS / name / "dequantized.json").read_text())
    found = matrices(FOLDERS / name)
    assert found.keys() == expected.keys()
    for key, matrix in found.items():
        halves = (matrix[...].to(torch.bfloat16) + 0).contiguous()
        data = halves.view(torch.int16).numpy().astype("<i2").tobytes()
        assert hashlib.sha256(data).hexdigest() == expected[key]["bfloat16"], key


@pytest.mark.parametrize("name", LABELS)
def test_packed_matrices_have_the_same_values(name: str) -> None:
    for key, matrix in matrices(FOLDERS / name).items():
        grouped = matrix.grouped()
        in_floats = "fp8" in name or ("mixed" in name and "self_attn" in key) or name in IN_FLOATS
        assert (grouped is None) == in_floats
        if grouped is not None:
            np.testing.assert_array_equal(grouped.dense(), matrix[...].numpy(), strict=True)


@pytest.mark.parametrize("name", LABELS)
def test_the_twin_dequantizes_to_the_same_values(name: str) -> None:
    twins = dequantized(FOLDERS / name)
    for key, matrix in matrices(FOLDERS / name).items():
        if key in twins:  # experts in one tensor have no names of their own
            torch.testing.assert_close(matrix[...], twins[key], rtol=3e-7, atol=0)


@pytest.mark.parametrize(("name", "label"), LABELS.items())
def test_the_label_names_the_format(name: str, label: str) -> None:
    scheme = scheme_of(FOLDERS / name)
    assert scheme is not None
    assert scheme.label == label


def test_every_folder_of_these_methods_is_compared() -> None:
    folders = [path.parent for path in FOLDERS.glob("*/config.json")]
    known = METHODS + METHODS_OF_EXPERTS
    with_fields = [one for one in folders if "quant" in (one / "config.json").read_text() or _has_file(one)]
    assert {one.name for one in with_fields if declaration(one).get("quant_method") in known} == set(LABELS)


def _has_file(folder: Path) -> bool:
    return (folder / "hf_quant_config.json").is_file()
