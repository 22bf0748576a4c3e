"""Matrices that files hold as codes, or that are quantized on the way, read as dense values or as grouped weights."""

from collections.abc import Sequence
from types import EllipsisType
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from engine.native.formats.grouped import GroupedWeights, TwoLevel
from engine.native.formats.tensors import ExpertPlace

ALL = slice(None)
Part: TypeAlias = "EllipsisType | slice | tuple[slice, slice]"
# Weights that are decoded at once: each takes about ten bytes meanwhile.
_PIECE = 1 << 20


class StoredCodes(Protocol):
    """A matrix [outputs, inputs] in the form of its file. Nothing is read before a call."""

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""

    def grouped(self, begin: int, end: int) -> GroupedWeights | None:
        """Return the outputs from `begin` to before `end` exactly; None if their values have no such form."""

    def values(self, begin: int, end: int) -> npt.NDArray[np.float32]:
        """Return the values of the same outputs, float32 [end - begin, inputs]."""


class CodedMatrix:
    """A matrix that is decoded as it is read, in pieces of rows. It is used like the slices of safetensors."""

    def __init__(self, codes: StoredCodes, dtype: torch.dtype, place: ExpertPlace | None = None) -> None:
        """Dense values are of `dtype`. `place` is that of an expert's matrix, if files have those of all as one."""
        self._codes, self.dtype, self.place = codes, dtype, place

    def get_shape(self) -> list[int]:
        """Return the shape, outputs first."""
        return list(self._codes.shape)

    def __getitem__(self, part: Part) -> torch.Tensor:
        rows, columns = part if isinstance(part, tuple) else (ALL if part is ... else part, ALL)
        outputs, inputs = self._codes.shape
        begin, end, _ = rows.indices(outputs)
        found = torch.empty((max(0, end - begin), inputs), dtype=self.dtype)
        for piece in pieces(begin, end, inputs):
            found[piece.start - begin : piece.stop - begin] = torch.from_numpy(
                self._codes.values(piece.start, piece.stop)
            )
        return found[:, columns] if columns != ALL else found

    def grouped(self, rows: slice = ALL) -> GroupedWeights | None:
        """Return rows as grouped weights; None if there is no such form that has their values."""
        begin, end, _ = rows.indices(self._codes.shape[0])
        parts = []
        for piece in pieces(begin, end, self._codes.shape[1]):
            part = self._codes.grouped(piece.start, piece.stop)
            if part is None:
                return None
            parts.append(part)
        return joined(parts)


def pieces(begin: int, end: int, inputs: int) -> list[slice]:
    """Return slices of rows that are decoded at once."""
    step = max(1, _PIECE // max(1, inputs))
    return [slice(start, min(start + step, end)) for start in range(begin, end, step)]


def joined(parts: Sequence[GroupedWeights]) -> GroupedWeights:
    """Return the rows of several parts of one matrix."""
    first = parts[0]
    if len(parts) == 1:
        return first
    rows = {name: _rows(parts, name) for name in ("codes", "scales", "minimums", "zeros", "output_scales")}
    levels = [part.levels for part in parts if part.levels is not None]
    whole = TwoLevel(*(_rows(levels, name) for name in TwoLevel._fields)) if levels else None
    return first._replace(**rows, levels=whole)


def _rows(parts: Sequence[GroupedWeights] | Sequence[TwoLevel], name: str) -> Any:
    found = [getattr(part, name) for part in parts]
    return None if found[0] is None else np.concatenate(found)
