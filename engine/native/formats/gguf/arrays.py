"""Arrays of a GGUF file's metadata. Only who needs an array reads it: a vocabulary has a million elements."""

import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.errors import ModelUnsupported
from engine.native.formats.gguf.header import STRING, ArrayPlace, GgufHeader

_NUMBERS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
_BYTES = (0, 1)


def check_texts(header: GgufHeader, key: str) -> ArrayPlace | None:
    """Return the place of an array of texts, None if the file has none under this key.

    Raises ModelUnsupported, with the key, for another type.
    """
    place = _place(header, key)
    if place and place.kind != STRING:
        raise ModelUnsupported(f"its {key} is no array of texts")
    return place


def read_texts(path: Path, header: GgufHeader, key: str) -> list[str] | None:
    """Read an array of texts, None if the file has none under this key. `header` is the file's, whose bounds hold.

    Raises ModelUnsupported, with the key, for an array of another type and for bytes that are not UTF-8.
    """
    place = check_texts(header, key)
    if place is None:
        return None
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return [_decoded(one, key, at) for at, one in enumerate(_split(content, place.offset, place.elements))]


def check_numbers(header: GgufHeader, key: str, kinds: str) -> ArrayPlace | None:
    """Return the place of an array of numbers, None if the file has none; `kinds` are numpy's of its type: i, u, f.

    Raises ModelUnsupported, with the key, for another type.
    """
    place = _place(header, key)
    if place and _NUMBERS.get(place.kind, "<?")[1] not in kinds:
        raise ModelUnsupported(f"its {key} is no array of {'whole ' if 'f' not in kinds else ''}numbers")
    return place


def read_numbers(path: Path, header: GgufHeader, key: str, kinds: str) -> npt.NDArray[Any] | None:
    """Read an array of numbers, None if the file has none under this key; `kinds` are numpy's of its type: i, u, f.

    Raises ModelUnsupported, with the key, for an array of another type.
    """
    place = check_numbers(header, key, kinds)
    if place is None:
        return None
    return np.fromfile(path, _NUMBERS[place.kind], place.elements, offset=place.offset)


def read_bytes(path: Path, header: GgufHeader, key: str) -> bytes:
    """Read an array of bytes, empty if the file has none. Raises ModelUnsupported, with the key, for another type."""
    check_bytes(header, key)
    found = read_numbers(path, header, key, "iu")
    return b"" if found is None else found.tobytes()


def check_bytes(header: GgufHeader, key: str) -> None:
    """Raise ModelUnsupported, with the key, for another type than an array of bytes."""
    place = _place(header, key)
    if place and place.kind not in _BYTES:
        raise ModelUnsupported(f"its {key} is no array of bytes")


def _place(header: GgufHeader, key: str) -> ArrayPlace | None:
    if key in header.metadata and key not in header.arrays:
        raise ModelUnsupported(f"its {key} is {str(header.metadata[key])[:40]!r}, not an array")
    return header.arrays.get(key)


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
