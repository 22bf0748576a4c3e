"""Arrays of a GGUF file's metadata. Only who needs an array reads it: a vocabulary has a million elements."""

import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import ModelUnsupported
from engine.native.formats.gguf_header import STRING, GgufHeader

_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}


def read_texts(path: Path, header: GgufHeader, key: str) -> list[str] | None:
    """Read an array of texts, None if the file has none under this key. `header` is the file's, whose bounds hold.

    Raises ModelUnsupported, with the key, for an array of another type and for bytes that are not UTF-8.
    """
    place = header.arrays.get(key)
    if place is None:
        _check_absent(header, key)
        return None
    if place.kind != STRING:
        raise ModelUnsupported(f"its {key} is no array of texts")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return [_decoded(one, key, at) for at, one in enumerate(_split(content, place.offset, place.elements))]


def read_numbers(path: Path, header: GgufHeader, key: str, kinds: str) -> npt.NDArray[Any] | None:
    """Read an array of numbers, None if the file has none under this key; `kinds` are numpy's of its type: i, u, f.

    Raises ModelUnsupported, with the key, for an array of another type.
    """
    place = header.arrays.get(key)
    if place is None:
        _check_absent(header, key)
        return None
    stored = _NUMBERS.get(place.kind)
    if stored is None or stored[1] not in kinds:
        raise ModelUnsupported(f"its {key} is no array of {'whole ' if 'f' not in kinds else ''}numbers")
    return np.fromfile(path, stored, place.elements, offset=place.offset)


def _check_absent(header: GgufHeader, key: str) -> None:
    if key in header.metadata:
        raise ModelUnsupported(f"its {key} is {str(header.metadata[key])[:40]!r}, not an array")


def _split(content: mmap.mmap, at: int, count: int) -> list[bytes]:
    """Return the bytes of texts that follow each other, each after its length. The header's reader has bounded them."""
    found = []
    for _ in range(count):
        (length,) = struct.unpack_from("<Q", content, at)
        found.append(content[at + 8 : at + 8 + length])
        at += 8 + length
    return found


def _decoded(text: bytes, key: str, at: int) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise ModelUnsupported(f"its {key}[{at}] is not UTF-8") from error
