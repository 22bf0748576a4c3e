"""Folders of the demo model in published formats, its dense values, and GGUF files of the same bits."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from bench.formats import writers
from bench.formats.writers import Stored
from engine.native.formats.gguf.file import gguf_of
from engine.native.formats.stored import files_of

_MATRIX = re.compile(r"model\.layers\.\d+\.(self_attn\.[qkvo]|mlp\.(gate|up|down))_proj")
_GGUF_MATRIX = re.compile(r"blk\.\d+\.(attn_(q|k|v|output)|ffn_(gate|up|down))\.weight")
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": writers.GROUP, "sym": True, "checkpoint_format": "gptq"}


class Published(NamedTuple):
    """A format: how its matrices are stored, what its configuration declares, and the GGUF type of the same bits."""

    write: Callable[[torch.Tensor], Stored]
    declared: Mapping[str, Any]
    same_bits: str


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"dynamic": False, **weights}, "input_activations": None}
    declared = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    return declared | {"ignore": ["lm_head"], "quantization_status": "compressed"}


_INTEGERS = {"type": "int", "symmetric": True}
FORMATS = {
    "gptq": Published(writers.gptq, {**_GPTQ, "desc_act": False}, "Q4_0"),
    "gptq_act_order": Published(writers.gptq_ordered, {**_GPTQ, "desc_act": True}, "Q4_0"),
    "awq": Published(
        writers.awq,
        {"quant_method": "awq", "bits": 4, "group_size": writers.GROUP, "version": "gemm", "zero_point": True},
        "Q4_0",
    ),
    "w4a16": Published(
        writers.w4a16,
        _compressed("pack-quantized", num_bits=4, strategy="group", group_size=writers.GROUP, **_INTEGERS),
        "Q4_0",
    ),
    "w8a8": Published(
        writers.w8a8, _compressed("int-quantized", num_bits=8, strategy="channel", group_size=None, **_INTEGERS), "Q8_0"
    ),
    "fp8": Published(
        writers.fp8, {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}, "BF16"
    ),
    "mxfp4": Published(
        writers.mxfp4,
        _compressed("mxfp4-pack-quantized", num_bits=4, type="float", symmetric=True, strategy="group", group_size=32),
        "Q4_0",
    ),
}


def write_published(demo: Path, name: str, folder: Path) -> None:
    """Write `folder/NAME`, the demo model in a format, and `folder/NAME-dense`, the values of its weights."""
    form = FORMATS[name]
    quantized: dict[str, torch.Tensor] = {}
    dense: dict[str, torch.Tensor] = {}
    for tensor, file in files_of(demo, torch.float32).items():
        values = file.get_slice(tensor)[...]
        module = tensor.removesuffix(".weight")
        if not _MATRIX.fullmatch(module):
            plain = values.to(torch.bfloat16)
            quantized[tensor], dense[tensor] = plain, plain.float()
            continue
        stored = form.write(values.float())
        quantized |= {f"{module}.{suffix}": part for suffix, part in stored.parts.items()}
        dense[tensor] = stored.values.contiguous()
    _save(demo, folder / name, quantized, {"quantization_config": dict(form.declared)})
    _save(demo, folder / f"{name}-dense", dense, {})


def _save(demo: Path, folder: Path, tensors: Mapping[str, torch.Tensor], more: Mapping[str, Any]) -> None:
    shutil.copytree(demo, folder, ignore=shutil.ignore_patterns("*.gguf", "*.safetensors"))
    save_file(dict(tensors), folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | dict(more)))


def write_gguf(demo: Path, kind: str, path: Path) -> Path:
    """Write the demo model's file with matrices of a type, such as Q4_0, and the embedding in bfloat16."""
    source = gguf_of(demo)
    assert source is not None, "the demo model's file"
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(path, architecture)
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(field.name, field.contents(), *_types(field))
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        values = values.reshape(tuple(reversed(tensor.shape.tolist())))
        matrix = _GGUF_MATRIX.fullmatch(tensor.name)
        stored = gguf.GGMLQuantizationType[kind if matrix else "BF16" if values.ndim > 1 else "F32"]
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _types(field: Any) -> tuple[Any, ...]:
    """Return the type of a field's value, and of its elements."""
    return (field.types[0], field.types[-1]) if len(field.types) > 1 else (field.types[0],)
