"""GPTQ, as AutoGPTQ and GPTQModel store it: int32 words of 2, 3, 4 or 8 bits, with a scale and a zero by group.

`qweight`, int32 [inputs * bits / 32, outputs], has the codes of inputs from the lowest bits of a word on; `qzeros`,
int32 [groups, outputs * bits / 32], the zeros of outputs; `scales` are float16 or bfloat16 [groups, outputs]. `g_idx`,
int32 [inputs], is the group of each input: with `desc_act`, inputs of a group do not follow each other. A weight is
scale * (code - zero).

Version 1 (`checkpoint_format` gptq, the default) stores zeros less by one, version 2 (gptq_v2) as they are. Version 1
is written by a subtraction from whole words, in which a zero of 0 borrows from the next one (`utils/model.py` of
GPTQModel), so it is read by an addition to words; only 3 bits, which cross words, are written and read one by one.
AutoGPTQ's own files are wrong where a zero is 0.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from engine.errors import ModelUnsupported
from engine.native.formats.quantized.fields import flag
from engine.native.formats.quantized.integer_groups import Bytes, Floats, Places
from engine.native.formats.quantized.integers.layouts import Layout, Rule, Rules, layout_of
from engine.native.formats.quantized.integers.scheme import IntegerScheme
from engine.native.formats.quantized.scheme import Scheme, check_matrix, check_part, not_served
from engine.native.formats.tensors import TypedTensor

BITS = (2, 3, 4, 8)
SCALES = ("F16", "BF16", "F32")  # safetensors' names of types
_WORD = 32  # bits
_VERSIONS = {"gptq": 1, "gptq_v2": 2}


def gptq(fields: Mapping[str, Any]) -> Scheme:
    """Return the scheme of a declaration. Raises ModelUnsupported, naming the field, if it is not served."""
    named = fields.get("checkpoint_format") or fields.get("format") or "gptq"
    version = _VERSIONS.get(named.lower()) if isinstance(named, str) else None
    if flag(fields, "is_marlin_format", default=False):
        named, version = "marlin", None
    if version is None:
        raise not_served(f"gptq in the format {named}")
    if rotation := fields.get("rotation"):
        raise not_served(f"gptq with the rotation {rotation}")
    layout = layout_of(fields, BITS)
    flag(fields, "sym", default=True)  # the zeros say it too
    return gptq_scheme("gptq", Rules(layout, _rules(fields.get("dynamic"), layout)), version)


def gptq_scheme(method: str, rules: Rules, version: int) -> Scheme:
    """Return the scheme of matrices in this form, of version 1 or 2. `method` begins its label."""
    return IntegerScheme(method, rules, partial(GptqParts, version=version), ("g_idx",))


def _rules(dynamic: Any, default: Layout) -> list[Rule]:
    """Return GPTQModel's rules: "-:pattern" excludes modules, "+:pattern" or "pattern" gives them other fields."""
    if dynamic is None:
        return []
    if not isinstance(dynamic, dict) or not all(isinstance(one, dict | None) for one in dynamic.values()):
        raise ModelUnsupported("its quantization has dynamic, which must map patterns to objects")
    return [
        Rule(
            pattern[2:] if pattern[:2] in ("-:", "+:") else pattern,
            None if pattern.startswith("-:") else layout_of(fields or {}, BITS, default),
        )
        for pattern, fields in dynamic.items()
    ]


class GptqParts:
    """The parts of one matrix (`IntegerParts`)."""

    def __init__(self, module: str, tensors: Mapping[str, TypedTensor], layout: Layout, version: int) -> None:
        """`tensors` are the parts by suffix, `g_idx` may be missing. Raises ModelUnsupported if one does not fit."""
        self._module, self._tensors, self._version = module, tensors, version
        self.bits = layout.bits
        words, outputs = check_matrix(f"{module}.qweight", tensors["qweight"], ("I32",))
        inputs = words * _WORD // self.bits
        if words * _WORD % self.bits or (self.bits == 3 and outputs % _WORD):
            raise ModelUnsupported(
                f"its tensor {module}.qweight has shape {[words, outputs]}, but 3 bits take whole 3 words of 32 codes"
            )
        self.shape = outputs, inputs
        self._group = inputs if layout.group == -1 else layout.group
        self._groups = -(-inputs // self._group)
        zeros = self._groups, -(-outputs * self.bits // _WORD)
        check_part(f"{module}.scales", tensors["scales"], (self._groups, outputs), SCALES, layout.declared)
        check_part(f"{module}.qzeros", tensors["qzeros"], zeros, ("I32",), layout.declared)
        if "g_idx" in tensors:
            check_part(f"{module}.g_idx", tensors["g_idx"], (inputs,), ("I32",))
        elif layout.ordered:
            raise ModelUnsupported(f"its files lack tensor {module}.g_idx, although desc_act is true")

    @property
    def half_scales(self) -> bool:
        """Whether scales are in float16 or bfloat16."""
        return self._tensors["scales"].get_dtype() != "F32"

    def group_of_inputs(self) -> Places:
        """Return the group of each input. Raises ModelUnsupported, with the tensor's name, if there is none."""
        consecutive = np.arange(self.shape[1]) // self._group
        if "g_idx" not in self._tensors:
            return consecutive
        groups = self._tensors["g_idx"][...].numpy().astype(np.int64)
        lowest, highest = int(groups.min()), int(groups.max())
        if lowest < 0 or highest >= self._groups:
            wrong = lowest if lowest < 0 else highest
            raise ModelUnsupported(f"its tensor {self._module}.g_idx has group {wrong} of {self._groups} groups")
        return groups if highest else consecutive  # some programs write zeros where groups are in order

    def codes(self, begin: int, end: int) -> Bytes:
        """Return the codes of outputs, [end - begin, inputs]."""
        return unpacked(self._tensors["qweight"][:, begin:end].numpy().T, self.bits)

    def zeros(self, begin: int, end: int) -> Bytes:
        """Return the zeros of outputs, [end - begin, groups]."""
        first = begin // _WORD  # 32 zeros take whole words
        last = min(-(-end // _WORD) * self.bits, self._tensors["qzeros"].get_shape()[1])
        words = self._tensors["qzeros"][:, first * self.bits : last].numpy().view(np.uint32)
        if self._version == 1 and self.bits != 3:
            words = words + np.uint32(sum(1 << place for place in range(0, _WORD, self.bits)))
        zeros = unpacked(words, self.bits)
        if self._version == 1 and self.bits == 3:
            zeros = (zeros + np.uint8(1)) & np.uint8(7)
        return zeros[:, begin - first * _WORD : end - first * _WORD].T

    def scales(self, begin: int, end: int) -> Floats:
        """Return the scales of outputs, [end - begin, groups]."""
        return self._tensors["scales"][:, begin:end].float().numpy().T


def unpacked(words: np.ndarray[Any, Any], bits: int) -> Bytes:
    """Return the numbers in words of 32 bits, [rows, words]: [rows, words * 32 / bits], from the lowest bits on."""
    rows = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return rows
    if bits == 3:  # 8 in 3 bytes
        each = np.unpackbits(rows, axis=1, bitorder="little").reshape(len(rows), -1, 3)
        threes: Bytes = each[..., 0] | each[..., 1] << np.uint8(1) | each[..., 2] << np.uint8(2)
        return threes
    found = np.empty((*rows.shape, 8 // bits), np.uint8)
    for place in range(8 // bits):
        found[..., place] = rows >> np.uint8(place * bits) & np.uint8((1 << bits) - 1)
    return found.reshape(len(rows), -1)
