"""The header of a GGUF file: metadata, and where its tensors are. Own code, because a header may be hostile.

The package `gguf` makes Python objects of every element of every array, which takes a second at each start, and reads
on when an array ends behind the file. Here arrays are passed over, and counts are bounded before anything is made of
them. The format is described in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

import mmap
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from math import prod
from pathlib import Path
from stat import S_ISREG
from typing import Any, NamedTuple

from engine.errors import ModelUnsupported
from engine.native.formats.gguf.blocks import FORMATS, BlockFormat
from engine.native.formats.gguf.parts import check_count, check_part, check_same, gguf_of, parts_of

__all__ = ["STRING", "ArrayPlace", "GgufHeader", "TensorPlace", "gguf_of", "read_header"]

_VERSIONS = (2, 3)
# Vocabularies have up to 300,000 tokens, with a score, a type and a merge for each.
_MOST_ELEMENTS = 1 << 22
_MOST_LAYERS, _SHOWN_CHARACTERS = 1 << 10, 80
_MOST_KEYS, _MOST_TENSORS, _MOST_DIMENSIONS = 1 << 14, 1 << 16, 4
# Longer texts are cut, which only chat templates are not: these have a bound of their own where they are read.
_MOST_TEXT_BYTES, _MOST_TEMPLATE_BYTES = 64 << 10, 1 << 20
_TEMPLATE = "tokenizer.chat_template"
STRING, _ARRAY = 8, 9
_WHOLE = (0, 1, 2, 3, 4, 5, 10, 11)
# Numbers of which llama.cpp reads an array too, with one for each layer.
_OF_LAYERS = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


class TensorPlace(NamedTuple):
    """A tensor in a file: its shape, outputs first, its format, and its bytes from `offset` on.

    `part` is the place of the file in `GgufHeader.files`.
    """

    name: str
    shape: tuple[int, ...]
    format: BlockFormat
    offset: int
    part: int = 0

    @property
    def size(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) // self.format.values * self.format.bytes


class ArrayPlace(NamedTuple):
    """An array of the metadata: the number of its type, how many elements it has, and its bytes from `offset` on."""

    kind: int
    elements: int
    offset: int


class GgufHeader(NamedTuple):
    """Metadata, with the tensors by the file's names and the places of the arrays by their keys.

    An array is None in the metadata, but one number if it has the same number for each layer. `files` are all parts;
    the first has the metadata and the arrays.
    """

    metadata: dict[str, Any]
    tensors: dict[str, TensorPlace]
    arrays: dict[str, ArrayPlace]
    files: tuple[Path, ...] = ()

    @property
    def architecture(self) -> str:
        """The architecture's name, empty if the file has none."""
        return str(self.metadata.get("general.architecture") or "")

    def number(self, name: str) -> int | None:
        """Return a whole number of the architecture's metadata, None if the file has none of this name."""
        found = self.metadata.get(f"{self.architecture}.{name}")
        return found if type(found) is int else None

    def said(self, key: str) -> str:
        """Return a value for a message: what the file has under a key."""
        return "an array" if key in self.arrays else str(self.metadata[key])[:_SHOWN_CHARACTERS]


def read_header(path: Path) -> GgufHeader:
    """Read the headers of a file and of its later parts. Sizes in a header do not cause large allocations.

    Raises ModelUnsupported, naming file and tensor, if a file is truncated or mislabelled, has a format that is not
    served, or is no part of the same model; without a tensor's name if it is no GGUF file or cannot be opened.
    """
    files = []
    for one in parts_of(path):
        with _named(one):
            facts = one.stat()
            if not S_ISREG(facts.st_mode):  # a pipe could be read for ever
                raise ModelUnsupported("it is no regular file")
        files.append((one, facts.st_size, facts.st_mtime_ns))
    return _read(tuple(files))


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Reraise errors as ModelUnsupported with the file's name."""
    try:
        yield
    except FileNotFoundError as error:
        gone = f"{path.name} is a link to {path.readlink()}, which is gone" if path.is_symlink() else "it is missing"
        raise ModelUnsupported(f"{path.name} cannot be read: {gone}") from error
    except (OSError, ValueError, ModelUnsupported) as error:  # an empty file cannot be mapped
        raise ModelUnsupported(f"{path.name} cannot be read: {error}") from error


@lru_cache(maxsize=4)
def _read(files: tuple[tuple[Path, int, int], ...]) -> GgufHeader:
    """Read the headers of all parts once for all that need them at a start: paths, sizes and times of change."""
    paths = tuple(path for path, _, _ in files)
    with _named(paths[0]):
        first = _read_part(paths[0])
    for part, path in enumerate(paths[1:], 1):
        with _named(path):
            _join(first, _read_part(path), part, paths[0].name)
    with _named(paths[0]):
        check_count(first.metadata, len(first.tensors))
    return first._replace(files=paths)


def _read_part(path: Path) -> GgufHeader:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        found = _Reader(content).header()
        check_part(path, found.metadata)
        return found


def _join(first: GgufHeader, other: GgufHeader, part: int, name: str) -> None:
    """Add a later part's tensors to the first part's. `name` is the file of the first part."""
    check_same(first.metadata, other.metadata, name)
    if len(first.tensors) + len(other.tensors) > _MOST_TENSORS:
        raise ModelUnsupported(f"its parts have more than {_MOST_TENSORS} tensors")
    for place in other.tensors.values():
        if place.name in first.tensors:
            raise ModelUnsupported(f"it has tensor {place.name}, which an earlier part has too")
        first.tensors[place.name] = place._replace(part=part)


class _Reader:
    """Reads a header from its start to its end."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._at = 0
        self._elements = 0
        self._arrays = dict[str, ArrayPlace]()

    def header(self) -> GgufHeader:
        if self._bytes(4) != b"GGUF":
            raise ModelUnsupported("it is no GGUF file")
        version = self._number("<I")
        if version not in _VERSIONS:
            raise ModelUnsupported(f"it has version {version} of GGUF; versions 2 and 3 are read, in little endian")
        tensors = self._count("tensors", _MOST_TENSORS)
        keys = self._count("metadata keys", _MOST_KEYS)
        metadata = dict(self._pair() for _ in range(keys))
        header = GgufHeader(metadata, {}, self._arrays)
        alignment = _whole(header, "general.alignment", 32)
        if alignment not in (1 << shift for shift in range(3, 17)):
            raise ModelUnsupported(f"its general.alignment is {alignment}, not a power of two between 8 and 65536")
        places = [self._tensor() for _ in range(tensors)]
        metadata |= self._of_all_layers(header)
        return GgufHeader(metadata, self._placed(places, alignment), self._arrays)

    def _of_all_layers(self, header: GgufHeader) -> dict[str, int]:
        """Return the numbers that arrays give for each layer, if that is the same one."""
        layers, found = header.number("block_count"), dict[str, int]()
        for name in _OF_LAYERS:
            place = self._arrays.get(key := f"{header.architecture}.{name}")
            if place and place.kind in _WHOLE and place.elements == layers and layers <= _MOST_LAYERS:
                code = _SCALARS[place.kind].removeprefix("<")
                values = set(struct.unpack_from(f"<{layers}{code}", self._content, place.offset))
                found |= dict.fromkeys([key], values.pop()) if len(values) == 1 else {}
        return found

    def _placed(self, places: list[TensorPlace], alignment: int) -> dict[str, TensorPlace]:
        """Return the tensors by name, with offsets in the file. They follow each other without gaps."""
        begin = _aligned(self._at, alignment)
        expected, found = 0, dict[str, TensorPlace]()
        for place in places:
            if place.offset != expected:
                raise ModelUnsupported(
                    f"tensor {place.name} begins at byte {place.offset} of the data instead of {expected}: its offset "
                    "is wrong, or the type or shape of the tensor before it"
                )
            if begin + place.offset + place.size > len(self._content):
                raise ModelUnsupported(f"it is truncated: tensor {place.name} ends behind the file's end")
            if place.name in found:
                raise ModelUnsupported(f"it has two tensors {place.name}")
            expected += _aligned(place.size, alignment)
            found[place.name] = place._replace(offset=begin + place.offset)
        return found

    def _tensor(self) -> TensorPlace:
        name = self._text()
        dimensions = self._number("<I")
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise ModelUnsupported(f"tensor {name} has {dimensions} dimensions, not 1 to {_MOST_DIMENSIONS}")
        shape = tuple(reversed([self._number("<Q") for _ in range(dimensions)]))
        # Each value takes at least a bit in any format.
        if not 1 <= prod(shape) <= 8 * len(self._content):
            raise ModelUnsupported(f"tensor {name} has shape {shape}, which is empty or does not fit into the file")
        number, offset = self._number("<I"), self._number("<Q")
        stored = FORMATS.get(number)
        if stored is None:
            raise ModelUnsupported(
                f"tensor {name} is of type {_type_name(number)}, which is not served: use a file with another "
                "quantization, such as Q4_K_M"
            )
        if shape[-1] % stored.values:
            raise ModelUnsupported(
                f"tensor {name} has rows of {shape[-1]} values, but {stored.name} has blocks of {stored.values}"
            )
        return TensorPlace(name, shape, stored, offset)

    def _pair(self) -> tuple[str, Any]:
        name, kind = self._text(), self._number("<I")
        if kind == _ARRAY:
            self._arrays[name] = self._pass_array(name, self._number("<I"))
            return name, None
        self._arrays.pop(name, None)  # the last value of a key counts
        return name, self._value(name, kind)

    def _value(self, name: str, kind: int) -> Any:
        if kind == STRING:
            return self._text(_MOST_TEMPLATE_BYTES if name == _TEMPLATE else _MOST_TEXT_BYTES)
        if kind not in _SCALARS:
            raise ModelUnsupported(f"its {name} is a value of the unknown type {kind}")
        return self._number(_SCALARS[kind])

    def _pass_array(self, name: str, kind: int) -> ArrayPlace:
        count = self._count("elements in arrays of its metadata", _MOST_ELEMENTS - self._elements)
        place = ArrayPlace(kind, count, self._at)
        self._elements += count
        if kind == STRING:
            for _ in range(count):
                self._bytes(self._number("<Q"), copied=False)
        elif kind in _SCALARS:
            self._bytes(count * struct.calcsize(_SCALARS[kind]), copied=False)
        else:
            raise ModelUnsupported(f"its {name} is an array of the type {kind}, which is not read")
        return place

    def _count(self, of: str, most: int) -> int:
        count: int = self._number("<Q")
        if count > most:
            raise ModelUnsupported(f"it has {count} {of}, more than {most}")
        return count

    def _text(self, most: int = _MOST_TEXT_BYTES) -> str:
        length = self._number("<Q")
        text = self._bytes(min(length, most))
        self._bytes(length - len(text), copied=False)
        return text.decode(errors="replace")

    def _number(self, kind: str) -> Any:
        (number,) = struct.unpack(kind, self._bytes(struct.calcsize(kind)))
        return number

    def _bytes(self, length: int, *, copied: bool = True) -> bytes:
        begin, self._at = self._at, self._at + length
        if self._at > len(self._content):
            raise ModelUnsupported("it is truncated: its header ends behind the file's end")
        return self._content[begin : self._at] if copied else b""


def _whole(header: GgufHeader, key: str, default: int) -> int:
    if key not in header.metadata:
        return default
    found = header.metadata[key]
    if type(found) is not int:
        raise ModelUnsupported(f"its {key} is {header.said(key)}, not a whole number")
    return found


def _aligned(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _type_name(number: int) -> str:
    from gguf import GGMLQuantizationType

    known: dict[int, str] = {kind.value: kind.name for kind in GGMLQuantizationType}
    return known.get(number, str(number))
