"""MXFP4 of GPT-OSS: experts in floats of 4 bits (e2m1) with a power of two for each 32 inputs (e8m0). No torch.

A layer has `mlp.experts.gate_up_proj_blocks`, uint8 [experts, 2 * intermediate, hidden / 32, 16], even inputs in the
low bits, and `gate_up_proj_scales`, uint8 [experts, 2 * intermediate, hidden / 32], exponents and 127; `down_proj_*`
have `hidden` outputs and `intermediate` inputs. Gates and ups alternate (transformers 5.23: `integrations/mxfp4.py`).
Other tensors are as they are: lists of modules that are not converted are not needed.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import ModelUnsupported
from engine.native.formats.grouped import E2M1, GroupedWeights, half_powers
from engine.native.formats.quantized.fields import check_no_cache, names
from engine.native.formats.quantized.float_codes import if_finite, nibbles
from engine.native.formats.quantized.scheme import Coded, Matrices, check_part, check_type, unused
from engine.native.formats.tensors import ExpertPlace, TypedTensor

_PARTS = tuple(f"{kind}_proj_{part}" for kind in ("gate_up", "down") for part in ("blocks", "scales"))
_EXPERTS = re.compile(rf"(.+\.experts)\.(?:{'|'.join(_PARTS)})")
_GROUP, _GROUP_BYTES = 32, 16
_MOST_EXPERTS = 4096
_NOT_A_NUMBER = 255


class Mxfp4Scheme:
    """A declaration of experts in MXFP4."""

    label = "mxfp4"

    def matrices(self, stored: Mapping[str, TypedTensor]) -> Matrices:
        """Return the matrices of experts, one by one. Raises ModelUnsupported, naming the tensor, as `Scheme`."""
        parts = unused(stored)
        coded: dict[str, Coded] = {}
        for experts in dict.fromkeys(match[1] for match in map(_EXPERTS.fullmatch, stored) if match):
            layer = _Layer(experts, stored)
            coded.update(layer.matrices())
            parts.update(layer.names)
        return Matrices(coded, frozenset(parts))


def mxfp4(fields: Mapping[str, Any]) -> Mxfp4Scheme:
    """Return the scheme of `mxfp4`. Raises ModelUnsupported, naming the field, for what is not served."""
    names(fields, "modules_to_not_convert")
    check_no_cache(fields, "kv_cache_scheme", "kv_cache_quant_method")
    return Mxfp4Scheme()


class Mxfp4Codes:
    """A matrix of one expert in the tensors of all."""

    def __init__(self, blocks: TypedTensor, scales: TypedTensor, scales_name: str, place: ExpertPlace) -> None:
        """`place` says which outputs of the tensors are the matrix's."""
        self._blocks, self._scales, self._scales_name, self._place = blocks, scales, scales_name, place

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return len(self._place.outputs), self._blocks.get_shape()[2] * _GROUP

    def grouped(self, begin: int, end: int) -> GroupedWeights | None:
        """Return outputs with the table of e2m1; None if a value is too large.

        Raises ModelUnsupported, with the name, if a scale is not finite.
        """
        return if_finite(self._weights(begin, end))

    def values(self, begin: int, end: int) -> npt.NDArray[np.float32]:
        """Return the products, float32. Raises ModelUnsupported, with the name, if a scale is not finite."""
        with np.errstate(over="ignore"):
            return self._weights(begin, end).dense()

    def _weights(self, begin: int, end: int) -> GroupedWeights:
        exponents = self._read(self._scales, begin, end)
        if (exponents == _NOT_A_NUMBER).any():
            raise ModelUnsupported(f"its tensor {self._scales_name} has scales that are not finite")
        blocks = self._read(self._blocks, begin, end)
        codes = nibbles(blocks.reshape(end - begin, -1))
        return GroupedWeights(codes, half_powers(exponents), None, 0, 4, _GROUP, table=E2M1)

    def _read(self, tensor: TypedTensor, begin: int, end: int) -> npt.NDArray[np.uint8]:
        rows = self._place.outputs[begin:end]
        one = slice(self._place.expert, self._place.expert + 1)
        found: npt.NDArray[np.uint8] = tensor[one, rows.start : rows[-1] + 1][0].numpy()[:: rows.step]
        return found


class _Layer:
    """The matrices of a layer's experts."""

    def __init__(self, experts: str, stored: Mapping[str, TypedTensor]) -> None:
        """Raises ModelUnsupported, naming the tensor, if one is missing or does not fit."""
        self._experts = experts
        self.names = [f"{experts}.{part}" for part in _PARTS]
        for name in self.names:
            if name not in stored:
                present = next(one for one in self.names if one in stored)
                raise ModelUnsupported(f"its files lack tensor {name}, although they have {present}")
        for kind in ("gate_up_proj", "down_proj"):
            if (dense := f"{experts}.{kind}") in stored:
                raise ModelUnsupported(f"its files have tensor {dense} twice: as it is, and in blocks")
        self._tensors = [stored[name] for name in self.names]
        self._count, self._inner, self._hidden = self._checked()

    def matrices(self) -> Iterator[tuple[str, Coded]]:
        """Yield them with the names that Qwen3-MoE's files have for the matrices of each expert."""
        gates, down = (0, 1), (2, 3)
        both = 2 * self._inner
        for expert in range(self._count):
            for part, (blocks, scales), outputs in (
                ("gate", gates, range(0, both, 2)),
                ("up", gates, range(1, both, 2)),
                ("down", down, range(self._hidden)),
            ):
                place = ExpertPlace(expert, outputs, transposed=True)
                codes = Mxfp4Codes(self._tensors[blocks], self._tensors[scales], self.names[scales], place)
                yield f"{self._experts}.{expert}.{part}_proj.weight", Coded(codes, place)

    def _checked(self) -> tuple[int, int, int]:
        """Return the number of experts, and the outputs of ups and of downs."""
        gates, gate_scales, down, down_scales = self._tensors
        name = self.names[0]
        check_type(name, gates, ("U8",))
        shape = gates.get_shape()
        if len(shape) != 4 or 0 in shape or shape[1] % (2 * _GROUP) or shape[3] != _GROUP_BYTES:
            raise ModelUnsupported(
                f"its tensor {name} has shape {shape}, not experts, outputs, groups and {_GROUP_BYTES}"
            )
        experts, both, groups, _ = shape
        if experts > _MOST_EXPERTS:
            raise ModelUnsupported(f"its tensor {name} has {experts} experts, more than {_MOST_EXPERTS}")
        inner, hidden = both // 2, groups * _GROUP
        check_part(self.names[1], gate_scales, (experts, both, groups), ("U8",))
        check_part(self.names[2], down, (experts, hidden, inner // _GROUP, _GROUP_BYTES), ("U8",))
        check_part(self.names[3], down_scales, (experts, hidden, inner // _GROUP), ("U8",))
        return experts, inner, hidden
