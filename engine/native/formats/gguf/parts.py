"""Files of one model in several parts, NAME-00001-of-00003.gguf and so on, as llama-gguf-split writes them.

The first part has the metadata; each has some of the tensors, the number of parts, and its own number, from 0 on.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.errors import ModelUnsupported

COUNT, NUMBER, TENSORS = "split.count", "split.no", "split.tensors.count"
_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.ASCII | re.IGNORECASE | re.DOTALL)
_SHOWN_CHARACTERS = 80
# Each part may have its own.
_OWN = (NUMBER, "general.alignment")


def gguf_of(folder: Path) -> Path | None:
    """Return the GGUF file with a folder's weights, the first of several parts; None if it has safetensors files.

    Also None if it has none. Raises ModelUnsupported if there are several that are not parts of one.
    """
    found = sorted({_first(path) for path in folder.glob("*.gguf")})
    if not found or any(folder.glob("*.safetensors")):
        return None
    if len(found) > 1:
        raise ModelUnsupported(f"{folder.name} has several .gguf files: {', '.join(one.name for one in found[:3])}")
    return found[0]


def parts_of(path: Path) -> Iterator[Path]:
    """Yield the paths of all parts of a file, its own if it is not split. Whether they exist is not checked.

    Raises ModelUnsupported if it is a later part.
    """
    name, number, count, suffix = _fields(path)
    if number != 1:
        raise ModelUnsupported(f"{path.name} is part {number} of {count}: give the first, {_first(path).name}")
    yield path
    yield from (path.with_name(_part(name, one, count, suffix)) for one in range(2, count + 1))


def check_part(path: Path, metadata: dict[str, Any]) -> None:
    """Raise ModelUnsupported unless a part's metadata have the number and the count of its name."""
    _, number, count, _ = _fields(path)
    declared = _whole(metadata, COUNT, 1 if count == 1 else 0)
    if count == 1 and declared not in (0, 1):
        raise ModelUnsupported(f"it is one of {declared} parts, but is not named NAME-00001-of-{declared:05}.gguf")
    if count > 1 and declared != count:
        raise ModelUnsupported(f"its name says that there are {count} parts, but its {COUNT} is {declared}")
    if count > 1 and (at := _whole(metadata, NUMBER, -1)) != number - 1:
        raise ModelUnsupported(f"its {NUMBER} is {at}, but part {number} of {count} has {number - 1}")


def check_same(first: dict[str, Any], other: dict[str, Any], name: str) -> None:
    """Raise ModelUnsupported if a later part has other metadata than the first, which has this name."""
    for key, value in other.items():
        if key not in _OWN and key in first and first[key] != value:
            said, known = (str(one)[:_SHOWN_CHARACTERS] for one in (value, first[key]))
            raise ModelUnsupported(f"its {key} is {said!r}, but that of {name} is {known!r}")


def check_count(metadata: dict[str, Any], tensors: int) -> None:
    """Raise ModelUnsupported unless all parts together have as many tensors as the first part's metadata say."""
    if (declared := _whole(metadata, TENSORS, tensors)) != tensors:
        raise ModelUnsupported(f"its {TENSORS} is {declared}, but its parts have {tensors} tensors")


def _first(path: Path) -> Path:
    name, _, count, suffix = _fields(path)
    return path.with_name(_part(name, 1, count, suffix)) if suffix else path


def _part(name: str, number: int, count: int, suffix: str) -> str:
    return f"{name}-{number:05}-of-{count:05}{suffix}"


def _fields(path: Path) -> tuple[str, int, int, str]:
    """Return name, number, count and suffix of a part; of other files, their name, 1, 1 and no suffix."""
    match = _NAME.fullmatch(path.name)
    if match is None or not 1 <= int(match[2]) <= int(match[3]):
        return path.name, 1, 1, ""
    return match[1], int(match[2]), int(match[3]), match[4]


def _whole(metadata: dict[str, Any], key: str, default: int) -> int:
    found = metadata.get(key, default)
    if type(found) is not int:
        said = "an array" if found is None else str(found)[:_SHOWN_CHARACTERS]
        raise ModelUnsupported(f"its {key} is {said}, not a whole number")
    return found
