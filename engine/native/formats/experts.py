"""The matrices of experts: one by one, as decoders read them, and joined, as transformers' modules have them."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from types import EllipsisType
from typing import Any, NamedTuple

import torch

from engine.errors import ModelUnsupported
from engine.native.formats.coded import ALL, CodedMatrix
from engine.native.formats.tensors import ExpertPlace, StoredTensor

# A number has one spelling: with another one, a file could have a matrix twice.
_EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(0|[1-9]\d{0,4})\.(gate|up|down)_proj\.weight", re.ASCII)
_ALL_EXPERTS = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(gate_up|down)_proj")
_PARTS = {"gate_up": ("gate", "up"), "down": ("down",)}
_DIMENSIONS = 3  # of a tensor of all experts


class ExpertMatrix:
    """One matrix of one expert, [outputs, inputs], in a tensor of all experts."""

    def __init__(self, stored: StoredTensor, place: ExpertPlace) -> None:
        """`stored` is the tensor of all experts."""
        self._stored = stored
        self.place = place

    def get_shape(self) -> list[int]:
        """Return the shape, outputs first."""
        return [len(self.place.outputs), self._stored.get_shape()[1 if self.place.transposed else 2]]

    def __getitem__(self, part: "EllipsisType | slice | tuple[slice, slice]") -> torch.Tensor:
        rows, columns = part if isinstance(part, tuple) else (ALL if part is ... else part, ALL)
        outputs = self.place.outputs[rows]
        span = slice(outputs.start, outputs[-1] + 1) if outputs else slice(0, 0)
        one = slice(self.place.expert, self.place.expert + 1)
        read: Any = self._stored  # files read three slices too
        found: torch.Tensor = read[one, :, span][0].T if self.place.transposed else read[one, span, :][0]
        return found[:: outputs.step, columns]


class JoinedExperts:
    """A tensor of all experts whose matrices are read one by one. Those that are coded are decoded as they are read."""

    def __init__(
        self, shape: list[int], matrices: Iterable[tuple[ExpertPlace, StoredTensor]], dtype: torch.dtype
    ) -> None:
        """`matrices` make up the tensor, which is of `dtype`."""
        self._shape, self._dtype = shape, dtype
        self._experts: dict[int, list[tuple[ExpertPlace, StoredTensor]]] = defaultdict(list)
        for place, matrix in matrices:
            self._experts[place.expert].append((place, matrix))

    def get_shape(self) -> list[int]:
        """Return the shape, experts first."""
        return self._shape

    def expert(self, number: int) -> torch.Tensor:
        """Return the part of one expert."""
        found = torch.empty(self._shape[1:], dtype=self._dtype)
        for place, matrix in self._experts[number]:
            place.of(found)[...] = matrix[...]
        return found

    def __getitem__(self, part: "EllipsisType | slice | tuple[slice, slice]") -> torch.Tensor:
        found = torch.empty(self._shape, dtype=self._dtype)
        for number, one in enumerate(found):
            one[...] = self.expert(number)
        return found[part]


def matrices_of_experts(tensors: Mapping[str, StoredTensor]) -> "dict[str, StoredTensor]":
    """Return tensors with those of all experts replaced by their matrices, as files have them: one for each expert."""
    found = dict(tensors)
    for name in filter(is_of_all_experts, tensors):
        experts, _, part = name.rpartition(".")
        downs = f"{experts}.down_proj"
        pair = [tensors[one] for one in (name, downs) if one in tensors]
        if part == "down_proj" or [len(one.get_shape()) for one in pair] != [_DIMENSIONS] * 2:
            continue
        alternating = f"{name}_bias" in tensors  # as in GPT-OSS; others have gates, then ups
        found |= _matrices(experts, found.pop(name), found.pop(downs), alternating=alternating)
    return found


def _matrices(experts: str, gates: StoredTensor, down: StoredTensor, *, alternating: bool) -> dict[str, StoredTensor]:
    """Return the matrices of a layer's experts. The side that is twice the inputs of `down` holds gates and ups."""
    count, *sides = gates.get_shape()
    transposed = sides[1] == 2 * down.get_shape()[1]
    both, hidden = sides[transposed], sides[not transposed]
    gate, up = (range(0, both, 2), range(1, both, 2)) if alternating else (range(both // 2), range(both // 2, both))
    parts = (("gate", gates, gate), ("up", gates, up), ("down", down, range(hidden)))
    return {
        f"{experts}.{one}.{part}_proj.weight": ExpertMatrix(stored, ExpertPlace(one, outputs, transposed))
        for one in range(count)
        for part, stored, outputs in parts
    }


class _Matrix(NamedTuple):
    """A matrix of an expert; `part` is gate, up or down."""

    name: str
    number: int
    part: str
    stored: StoredTensor

    def place(self) -> ExpertPlace:
        """Return the place in the joined tensor: that which it was taken from, or the first or second half."""
        if isinstance(self.stored, ExpertMatrix | CodedMatrix) and self.stored.place:
            return self.stored.place
        outputs = self.stored.get_shape()[0]
        begin = outputs if self.part == "up" else 0
        return ExpertPlace(self.number, range(begin, begin + outputs), transposed=False)


def joined_experts(tensors: Mapping[str, StoredTensor], dtype: torch.dtype) -> dict[str, StoredTensor]:
    """Return tensors with the matrices of experts joined, as values of `dtype`, in layers where some are coded.

    Raises ModelUnsupported, naming the tensor, if a matrix is missing, or has another shape than those of others.
    """
    layers: dict[str, dict[str, _Matrix]] = defaultdict(dict)
    for match in filter(None, map(_EXPERT.fullmatch, tensors)):
        layers[match[1]][match[0]] = _Matrix(match[0], int(match[2]), match[3], tensors[match[0]])
    found, replaced = dict[str, StoredTensor](), set[str]()
    for experts, matrices in layers.items():
        if any(isinstance(one.stored, CodedMatrix) for one in matrices.values()):
            found |= _joined(experts, matrices, dtype)
            replaced.update(matrices)
    if twice := next((name for name in found if name in tensors), None):
        raise ModelUnsupported(f"its files have tensor {twice} twice: as it is, and in the matrices of experts")
    return {name: one for name, one in tensors.items() if name not in replaced} | found


def _joined(experts: str, matrices: Mapping[str, _Matrix], dtype: torch.dtype) -> dict[str, StoredTensor]:
    """Return the tensors of one layer. Raises ModelUnsupported as `joined_experts`."""
    count, found = 1 + max(one.number for one in matrices.values()), dict[str, StoredTensor]()
    for kind, parts in _PARTS.items():
        names = [f"{experts}.{number}.{part}_proj.weight" for number in range(count) for part in parts]
        if lacking := next((name for name in names if name not in matrices), None):
            raise ModelUnsupported(f"its files lack tensor {lacking}, although they have {next(iter(matrices))}")
        chosen = [matrices[name] for name in names]
        places = [(one.place(), one.stored) for one in chosen]
        found[f"{experts}.{kind}_proj"] = JoinedExperts([count, *_joined_sides(chosen)], places, dtype)
    return found


def _joined_sides(matrices: list[_Matrix]) -> list[int]:
    """Return the sides of an expert's part of a joined tensor. Raises ModelUnsupported as `joined_experts`."""
    shape = matrices[0].stored.get_shape()
    for name, _, _, stored in matrices:
        if stored.get_shape() != shape or len(shape) != 2 or 0 in shape:
            raise ModelUnsupported(f"its tensor {name} has shape {stored.get_shape()}, but other experts' {shape}")
    places = [one.place() for one in matrices]
    sides = [1 + max(place.outputs[-1] for place in places), shape[1]]
    return sides[::-1] if places[0].transposed else sides


def is_of_all_experts(name: str) -> bool:
    """Return whether a tensor has the gates and ups, or the downs, of all experts of a layer."""
    return bool(_ALL_EXPERTS.fullmatch(name))
