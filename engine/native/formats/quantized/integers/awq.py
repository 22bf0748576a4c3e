"""AWQ, as AutoAWQ's version gemm stores it: int32 words of eight outputs, with a scale and a zero by group of inputs.

`qweight`, int32 [inputs, outputs / 8], and `qzeros`, int32 [inputs / group, outputs / 8], have four bits of outputs 0,
2, 4, 6, 1, 3, 5, 7 of eight, from the lowest on; `scales` are float16 or bfloat16 [inputs / group, outputs]. A weight
is scale * (code - zero). See `awq/modules/linear/gemm.py` of AutoAWQ.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from engine.errors import ModelUnsupported
from engine.native.formats.quantized.fields import flag, names
from engine.native.formats.quantized.integer_groups import Bytes, Floats, Places
from engine.native.formats.quantized.integers.gptq import SCALES
from engine.native.formats.quantized.integers.layouts import Layout, Rules, layout_of
from engine.native.formats.quantized.integers.scheme import IntegerScheme
from engine.native.formats.quantized.scheme import Scheme, check_matrix, check_part, not_served
from engine.native.formats.tensors import TypedTensor

BITS = (4,)
_OUTPUTS = 8  # of a word
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# Names that AWQ's own files have for fields.
_OWN = {"w_bit": "bits", "q_group_size": "group_size"}


def awq(fields: Mapping[str, Any]) -> Scheme:
    """Return the scheme of a declaration. Raises ModelUnsupported, naming the field, if it is not served."""
    version = fields.get("version") or fields.get("format") or "gemm"
    if fields.get("backend") == "llm-awq":
        version = "llm-awq"
    if not isinstance(version, str) or version.lower() != "gemm":
        raise not_served(f"awq in the format {version}")
    flag(fields, "zero_point", default=True)  # the zeros say it too
    names(fields, "modules_to_not_convert")  # those have dense matrices
    return awq_scheme("awq", Rules(layout_of({_OWN.get(name, name): one for name, one in fields.items()}, BITS)))


def awq_scheme(method: str, rules: Rules) -> Scheme:
    """Return the scheme of matrices in this form. `method` begins its label."""
    return IntegerScheme(method, rules, AwqParts)


class AwqParts:
    """The parts of one matrix (`IntegerParts`)."""

    bits = 4

    def __init__(self, module: str, tensors: Mapping[str, TypedTensor], layout: Layout) -> None:
        """`tensors` are the parts by suffix. Raises ModelUnsupported if one does not fit."""
        self._tensors = tensors
        inputs, words = check_matrix(f"{module}.qweight", tensors["qweight"], ("I32",))
        self.shape = words * _OUTPUTS, inputs
        self._group = inputs if layout.group == -1 else layout.group
        if inputs % self._group:
            raise ModelUnsupported(
                f"its tensor {module}.qweight has {inputs} inputs, no multiple of group_size {self._group}"
            )
        groups = inputs // self._group
        check_part(f"{module}.scales", tensors["scales"], (groups, words * _OUTPUTS), SCALES, layout.declared)
        check_part(f"{module}.qzeros", tensors["qzeros"], (groups, words), ("I32",), layout.declared)

    @property
    def half_scales(self) -> bool:
        """Whether scales are in float16 or bfloat16."""
        return self._tensors["scales"].get_dtype() != "F32"

    def group_of_inputs(self) -> Places:
        """Return the group of each input."""
        return np.arange(self.shape[1]) // self._group

    def codes(self, begin: int, end: int) -> Bytes:
        """Return the codes of outputs, [end - begin, inputs]."""
        return self._unpacked("qweight", begin, end)

    def zeros(self, begin: int, end: int) -> Bytes:
        """Return the zeros of outputs, [end - begin, groups]."""
        return self._unpacked("qzeros", begin, end)

    def scales(self, begin: int, end: int) -> Floats:
        """Return the scales of outputs, [end - begin, groups]."""
        return self._tensors["scales"][:, begin:end].float().numpy().T

    def _unpacked(self, suffix: str, begin: int, end: int) -> Bytes:
        first = begin // _OUTPUTS
        words = self._tensors[suffix][:, first : -(-end // _OUTPUTS)].numpy().view(np.uint32).T
        found = np.empty((len(words), _OUTPUTS, words.shape[1]), np.uint8)
        for place, output in enumerate(_ORDER):
            found[:, output] = words >> (4 * place) & 15
        return found.reshape(-1, words.shape[1])[begin - first * _OUTPUTS : end - first * _OUTPUTS]
