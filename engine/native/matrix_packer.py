"""Packs a model's matrices as the kernels multiply them, in pieces of rows: few of their values exist twice at once."""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import ModelUnsupported
from engine.native.formats.grouped import GroupedWeights
from engine.native.grouped_strips import OUTPUTS, NoKernel, pack_strips, strips_size
from engine.native.kernels import Kernels, NativeMatrix, packed_size
from engine.native.llama_weights import LlamaWeights

_ROOM = 64 << 20  # bytes allocated at once for packed weights
_PIECE = 16 << 20  # weights that are read at once

Order = npt.NDArray[np.int64] | None
Strips = npt.NDArray[np.void]


class _Group(NamedTuple):
    """The strips of matrices that multiply the same rows."""

    strips: list[Strips]
    order: Order

    def alternating(self) -> Strips:
        """Return a strip of each matrix, then the next of each."""
        return np.stack(self.strips, axis=1).reshape(-1)


class MatrixPacker:
    """Packs matrices by name. Quantized ones stay so if the kernels multiply exactly their values.

    Where the kernels need matrices in one form, all are dequantized to bfloat16 unless all can stay quantized. Methods
    raise ModelUnsupported if a matrix is missing.
    """

    def __init__(self, kernels: Kernels, weights: LlamaWeights, threads: int) -> None:
        """`weights` are read while packing."""
        self._kernels, self._weights, self._threads = kernels, weights, threads
        self._room = torch.empty(0, dtype=torch.uint8)  # for the next packed weights
        self.kept: list[Any] = []
        """Tensors and arrays that packed matrices point to."""

    def matrix(self, *names: str) -> NativeMatrix:
        """Pack matrices, whose outputs follow each other."""
        if groups := self._grouped([names]):
            return self._native(groups[0].strips, groups[0].order)
        return self._dense([[name] for name in names])

    def mlp(self, gate: str, up: str, down: str) -> tuple[NativeMatrix, NativeMatrix]:
        """Pack gate and gated product, 16 outputs of each alternating, and the matrix after them, all in one form."""
        if groups := self._grouped([(gate, up), (down,)]):
            gates, downs = groups
            return self._native([gates.alternating()], gates.order), self._native(downs.strips, downs.order)
        return self._dense([(gate, up)]), self._dense([(down,)])

    def experts(self, names: Sequence[Sequence[str]]) -> tuple[NativeMatrix, NativeMatrix]:
        """Pack gate, up and down of each expert as `mlp` does, those of one expert after those of another.

        They are in one form, dequantized if one has an order of inputs: the kernels quantize a token's row once for all
        experts.
        """
        pairs = list(chain.from_iterable((three[:2], three[2:]) for three in names))
        if groups := self._grouped(pairs, may_order=False):
            gates = [one.alternating() for one in groups[::2]]
            return self._native(gates), self._native([one.strips[0] for one in groups[1::2]])
        return self._dense(pairs[::2]), self._dense(pairs[1::2])

    def _grouped(self, groups: Sequence[Sequence[str]], *, may_order: bool = True) -> list[_Group] | None:
        """Pack quantized matrices by groups; None, and no memory is taken, unless the kernels multiply all of them."""
        room, kept = self._room, len(self.kept)
        try:
            return [self._group(names, may_order=may_order) for names in groups]
        except NoKernel:
            for memory in self.kept[kept:]:
                memory.zero_()  # dense matrices are packed into zeros
            del self.kept[kept:]
            self._room = room
            return None

    def _group(self, names: Sequence[str], *, may_order: bool) -> _Group:
        strips: list[Strips] = []
        orders: list[Order] = []
        for name in names:
            pieces: list[Strips] = []
            for rows in _pieces(*self._shape(name)):
                weights = self._weights.grouped(name, rows)
                if weights is None:
                    raise NoKernel(f"tensor {name} is not quantized")
                pieces.append(self._strips(weights))
                orders.append(weights.order)
            strips.append(np.concatenate(pieces))
        return _Group(strips, _shared(orders, self._shape(names[0])[1], may_order=may_order))

    def _strips(self, weights: GroupedWeights) -> Strips:
        packed = self._take(strips_size(self._kernels, weights))
        return pack_strips(self._kernels, weights, packed, self._threads)

    def _native(self, strips: Sequence[Strips], order: Order = None) -> NativeMatrix:
        joined = np.concatenate(strips)
        self.kept.append(joined)
        described = NativeMatrix(strips=joined.ctypes.data, count=len(joined))
        if order is not None:
            narrow = order.astype(np.int32)
            self.kept.append(narrow)
            described.order = narrow.ctypes.data
        return described

    def _dense(self, groups: Sequence[Sequence[str]]) -> NativeMatrix:
        """Pack matrices one after the other as bfloat16; those of a group alternate, 16 outputs of each."""
        shapes = [self._shape(names[0]) for names in groups]
        sizes = [len(names) * packed_size(shape) for names, shape in zip(groups, shapes, strict=True)]
        packed = left = self._take(2 * sum(sizes)).view(torch.bfloat16)
        for names, shape in zip(groups, shapes, strict=True):
            for rows in _pieces(*shape):
                piece = alternating(*(self._rows(name, rows) for name in names))
                self._kernels.pack(piece, left)
                left = left[packed_size(piece.shape) :]
        return NativeMatrix(dense=packed.data_ptr())

    def _shape(self, name: str) -> tuple[int, int]:
        shape = self._weights.shape(name)
        if shape is None:
            raise ModelUnsupported(f"its weights have no tensor {name}")
        if len(shape) != 2:
            raise ModelUnsupported(f"its tensor {name} has shape {list(shape)}, which is no matrix's")
        return shape[0], shape[1]

    def _rows(self, name: str, rows: slice) -> torch.Tensor:
        found = self._weights.tensor(name, rows)
        assert found is not None, "it has a shape"
        return found

    def _take(self, count: int) -> torch.Tensor:
        """Return memory for packed weights."""
        if count > len(self._room):  # matrices share large pages, because most would not fill one
            self._room = self._kernels.zeros([max(count, _ROOM)], torch.uint8)
        packed, self._room = self._room[:count], self._room[count:]
        self.kept.append(packed)
        return packed


def _pieces(outputs: int, inputs: int) -> list[slice]:
    """Return slices of whole strips."""
    step = max(1, _PIECE // (OUTPUTS * max(1, inputs))) * OUTPUTS
    return [slice(begin, min(begin + step, outputs)) for begin in range(0, outputs, step)]


def alternating(*matrices: torch.Tensor) -> torch.Tensor:
    """Return 16 rows of each matrix, then the next of each; of one matrix all rows."""
    if len(matrices) == 1:
        return matrices[0]
    rows, inputs = matrices[0].shape
    pieces = [one.view(rows // OUTPUTS, OUTPUTS, inputs) for one in matrices]
    return torch.stack(pieces, dim=1).view(-1, inputs)


def _shared(orders: Sequence[Order], inputs: int, *, may_order: bool) -> Order:
    """Return the order of inputs that matrices share. Raises NoKernel if they do not.

    Raises ModelUnsupported unless it has each input once: the kernels read from where it points.
    """
    first, *others = orders
    if first is None and all(one is None for one in others):
        return None
    if first is None or not may_order or not all(one is not None and np.array_equal(first, one) for one in others):
        raise NoKernel("matrices that multiply the same rows have orders of their own")
    if not np.array_equal(np.sort(first), np.arange(inputs)):
        raise ModelUnsupported("a quantized matrix has an order of inputs that does not have each of them once")
    return first
