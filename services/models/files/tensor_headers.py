"""The tensors that safetensors files declare in their headers. No weights are read, and nothing large is allocated.

The format is described in https://huggingface.co/docs/safetensors: the header's size in 8 bytes, the header as JSON,
and the tensors without gaps.
"""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import from_json

from services.models.files.bounded_json import InvalidModelFile
from services.models.files.numbers import FileSchema

# Of the library safetensors.
_MOST_HEADER_BYTES = 100_000_000
_SIZE_BYTES = 8
_MOST_TEXT_BYTES = 1 << 16
_LONGEST_NAME = 120
_ABOUT = "__metadata__"
_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}

_Natural = Annotated[int, Field(ge=0, lt=1 << 63)]


class _Entry(FileSchema):
    dtype: str
    shape: Annotated[list[_Natural], Field(max_length=16)]
    data_offsets: tuple[_Natural, _Natural]


_ENTRIES = TypeAdapter(dict[str, _Entry])

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorHeader:
    """The type and shape of a tensor, used like the handles of safetensors. Only short texts are read.

    `begin` is its place in the file, if that is known.
    """

    dtype: str
    shape: Shape
    file: Path | None = None
    begin: int = 0

    def get_shape(self) -> list[int]:
        """Return the shape, outputs first."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """Return safetensors' name of the type."""
        return self.dtype

    def __getitem__(self, _part: Any) -> Any:
        """Read a short text, as uint8. Raises TypeError for other tensors, because a check reads no weights."""
        if self.file is None or self.dtype != "U8" or prod(self.shape) > _MOST_TEXT_BYTES:
            raise TypeError("only the header of the tensor is known")
        return np.fromfile(self.file, np.uint8, prod(self.shape), offset=self.begin)


class _Place(NamedTuple):
    begin: int
    end: int
    name: str


def tensor_headers(path: Path) -> dict[str, TensorHeader]:
    """Return the header of each tensor in a file. Raises InvalidModelFile, with the name of a wrong tensor."""
    content, size = _header(path)
    try:
        declared: Any = from_json(content)
        if not isinstance(declared, dict):
            raise InvalidModelFile(f"{path.name} has a damaged header: it is no JSON object")
        declared.pop(_ABOUT, None)
        entries = _ENTRIES.validate_python(declared, strict=False)
    except ValidationError as error:
        place = ".".join(map(str, error.errors()[0]["loc"]))
        raise InvalidModelFile(f"{path.name} has a damaged header: {_printed(place)} is wrong") from error
    except ValueError as error:
        raise InvalidModelFile(f"{path.name} has a damaged header: {error}") from error
    _check_places(path.name, entries, size)
    data = _SIZE_BYTES + len(content)
    return {
        name: TensorHeader(entry.dtype, tuple(entry.shape), path, data + entry.data_offsets[0])
        for name, entry in entries.items()
    }


def _header(path: Path) -> tuple[bytes, int]:
    """Return the header of a file, and the bytes behind it."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size - _SIZE_BYTES
            length = int.from_bytes(file.read(_SIZE_BYTES), "little")
            if size < 0 or length > size:
                raise InvalidModelFile(f"{path.name} is truncated: its header ends behind the file's end")
            if length > _MOST_HEADER_BYTES:
                raise InvalidModelFile(f"{path.name} has a header of {length} bytes, not at most {_MOST_HEADER_BYTES}")
            return file.read(length), size - length
    except OSError as error:
        raise InvalidModelFile(f"{path.name} cannot be read: {error.strerror or error}") from error


def _check_places(file: str, entries: dict[str, _Entry], size: int) -> None:
    """Raise InvalidModelFile unless the tensors follow each other, each as long as its shape, up to the end."""
    expected = 0
    for begin, end, name in sorted(_Place(*one.data_offsets, name) for name, one in entries.items()):
        entry, printed = entries[name], _printed(name)
        if end > size:
            raise InvalidModelFile(f"{file} is truncated: tensor {printed} ends behind the file's end")
        if begin != expected:
            raise InvalidModelFile(f"{file}: tensor {printed} begins at byte {begin} of the data instead of {expected}")
        bits = prod(entry.shape) * _BITS.get(entry.dtype, 0)
        if entry.dtype not in _BITS or end - begin != bits // 8:
            shape = f"{entry.dtype} {entry.shape}"
            raise InvalidModelFile(f"{file}: tensor {printed} has {end - begin} bytes, which are not those of {shape}")
        expected = end
    if expected != size:
        raise InvalidModelFile(f"{file} has {size - expected} bytes behind its last tensor")


def _printed(name: str) -> str:
    return name if name.isprintable() and len(name) <= _LONGEST_NAME else repr(name[:_LONGEST_NAME])
