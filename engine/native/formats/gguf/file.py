"""The weights of a GGUF file, mapped into memory, and decoded a tensor or some rows at a time."""

from collections import Counter
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import ModelUnsupported
from engine.native.formats.coded import ALL, Part, pieces
from engine.native.formats.gguf.blocks import Bytes
from engine.native.formats.gguf.header import GgufHeader, TensorPlace, gguf_of, read_header
from engine.native.formats.gguf.llama_metadata import ROTATION_FACTORS
from engine.native.formats.gguf.llama_names import ARCHITECTURES, names_of, row_order
from engine.native.formats.grouped import GroupedWeights

__all__ = ["GgufFile", "GgufTensor", "gguf_of", "is_llama", "quantized_format", "rotation_factors"]

_DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufTensor:
    """A tensor of a file, used like the slices of safetensors: `get_shape()`, and `[...]`, `[rows]`, `[rows, columns]`.

    What is quantized is decoded to `dtype`; other tensors keep the file's type. Nothing is read before.
    """

    def __init__(self, content: Bytes, place: TensorPlace, heads: int, dtype: torch.dtype) -> None:
        """`heads` is the number of heads whose rows are reordered, 0 for none."""
        self._place = place
        self._dtype = dtype
        rows = place.shape[0] if len(place.shape) > 1 else 1
        width = place.size // rows
        self._rows = content[place.offset : place.offset + place.size].reshape(rows, width)
        self._order = row_order(place.shape[0], heads) if heads else None

    def get_shape(self) -> list[int]:
        """Return the shape, outputs first."""
        return list(self._place.shape)

    def __getitem__(self, part: Part) -> torch.Tensor:
        rows, columns = part if isinstance(part, tuple) else (ALL if part is ... else part, ALL)
        shape = self._place.shape
        if len(shape) == 1:  # reordered biases have a row for each element, as matrices do
            whole = self._values(self._rows).view(shape)
            return (whole if self._order is None else whole[torch.from_numpy(self._order)])[rows]
        begin, end, _ = rows.indices(shape[0])
        found = torch.empty((max(0, end - begin), *shape[1:]), dtype=self.dtype)
        for piece in pieces(begin, end, prod(shape[1:])):
            values = self._values(self._raw(piece))
            found[piece.start - begin : piece.stop - begin] = values.view(piece.stop - piece.start, *shape[1:])
        return found[:, columns] if columns != ALL else found

    @property
    def dtype(self) -> torch.dtype:
        """Type of the values that are read."""
        return _DENSE.get(self._place.format.name, self._dtype)

    @property
    def is_grouped(self) -> bool:
        """Whether the tensor is a quantized matrix."""
        return self._place.format.decode is not None and len(self._place.shape) == 2

    def grouped(self, rows: slice = ALL) -> GroupedWeights | None:
        """Return rows of a quantized matrix, None if the tensor is not quantized."""
        with np.errstate(invalid="ignore"):  # callers refuse what is not finite
            return self._place.format.grouped(self._raw(rows)) if self.is_grouped else None

    def _raw(self, rows: slice) -> Bytes:
        return self._rows[rows] if self._order is None else self._rows[self._order[rows]]

    def _values(self, raw: Bytes) -> torch.Tensor:
        stored = self._place.format
        if stored.decode:
            with np.errstate(invalid="ignore", over="ignore"):
                return torch.from_numpy(stored.grouped(raw).dense()).to(self._dtype)
        assert stored.dense is not None
        values = np.ascontiguousarray(raw).view(np.int16 if stored.name == "BF16" else stored.dense)
        return torch.from_numpy(values.copy()).view(_DENSE[stored.name])


class GgufFile:
    """The tensors of a Llama-shaped model by transformers' names."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        """Map a file and the parts that follow it; quantized tensors are read as `dtype`. Raises ModelUnsupported."""
        self._dtype = dtype
        self._header = read_header(path)
        if self._header.architecture not in ARCHITECTURES:
            raise ModelUnsupported(
                f"{path.name} is of architecture {self._header.architecture!r}, which is not Llama's"
            )
        try:
            self._names = names_of(self._header)
        except ModelUnsupported as error:
            raise ModelUnsupported(f"{path.name} cannot be read: {error}") from error
        self._contents: list[Bytes] = [np.memmap(one, dtype=np.uint8, mode="r") for one in self._header.files]

    def keys(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._names)

    def get_slice(self, name: str) -> GgufTensor:
        """Return the handle of a tensor."""
        stored, heads = self._names[name]
        place = self._header.tensors[stored]
        return GgufTensor(self._contents[place.part], place, heads, self._dtype)

    def get_tensor(self, name: str) -> torch.Tensor:
        """Read a tensor."""
        return self.get_slice(name)[...]


def is_llama(path: Path) -> bool:
    """Return whether GgufFile reads a file: a Llama-shaped model. Raises ModelUnsupported as `read_header`."""
    return read_header(path).architecture in ARCHITECTURES


def rotation_factors(header: GgufHeader) -> npt.NDArray[np.float32] | None:
    """Return the factors of Llama 3.1's rotations, float32 [head_size / 2]; None if the file has none."""
    place = header.tensors.get(ROTATION_FACTORS)
    if place is None or place.format.name != "F32":
        return None
    return np.fromfile(header.files[place.part], np.float32, place.size // 4, offset=place.offset)


def quantized_format(path: Path) -> str:
    """Return the format that most quantized weights of a Llama-shaped model have; empty for other models, or without.

    Raises ModelUnsupported as `read_header`.
    """
    header = read_header(path)
    counts: Counter[str] = Counter()
    for place in header.tensors.values():
        if place.format.decode and header.architecture in ARCHITECTURES:
            counts[place.format.name] += prod(place.shape)
    return counts.most_common(1)[0][0] if counts else ""
