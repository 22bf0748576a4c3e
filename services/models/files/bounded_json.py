"""Reads JSON files of a model's folder: of bounded size and depth, with finite numbers.

`json` recurses until Python's stack ends, accepts NaN and takes the last of equal keys. The parser of pydantic is
bounded in depth, and names line and column of a fault.
"""

import codecs
import json
import math
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic_core import from_json

MOST_BYTES = 16 << 20
"""Largest configuration."""
MOST_TOKENIZER_BYTES = 256 << 20
"""Largest tokenizer; gateways take no larger one either."""

# Of pydantic's parser.
_MOST_DEPTH = 200
_TOO_DEEP = "recursion limit exceeded"
# State-space models write that their steps have no limit; no layer that is served reads it.
_MAY_BE_INFINITE = "time_step_limit"
_BYTE_ORDER_MARKS = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_KINDS = {list: "an array", str: "a string", bool: "true or false", type(None): "null"}


class InvalidModelFile(ValueError):
    """A file of a model cannot be used; the message names it, the place in it, and the reason."""


def read_object(path: Path, most_bytes: int = MOST_BYTES) -> dict[str, Any]:
    """Return the object in a file. Raises InvalidModelFile."""
    return _object(path.name, _content(path, most_bytes))


def read_configuration(path: Path) -> dict[str, Any]:
    """Return the object in a file whose numbers are finite and whose keys occur once. Raises InvalidModelFile."""
    content = _content(path, MOST_BYTES)
    found = _object(path.name, content)
    json.loads(content, object_pairs_hook=lambda pairs: _unique(path.name, pairs))
    for place, value in _numbers(found):
        if not math.isfinite(value) and _MAY_BE_INFINITE not in place:
            raise InvalidModelFile(f"{path.name}: {place} must be a finite number, not {json.dumps(value)}")
    return found


def _content(path: Path, most_bytes: int) -> bytes:
    try:
        facts = path.stat()
        if not stat.S_ISREG(facts.st_mode):  # a pipe or a device could be read for ever
            raise InvalidModelFile(f"{path.name} is no regular file")
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
    except FileNotFoundError as error:
        raise InvalidModelFile(f"{path.name} is missing") from error
    except OSError as error:
        raise InvalidModelFile(f"{path.name} cannot be read: {error.strerror or error}") from error
    if len(content) > most_bytes:
        raise InvalidModelFile(f"{path.name} must have at most {most_bytes} bytes, not {facts.st_size}")
    return content


def _object(name: str, content: bytes) -> dict[str, Any]:
    if content.startswith(_BYTE_ORDER_MARKS):
        raise InvalidModelFile(f"{name} begins with a byte order mark: it must be UTF-8 without one")
    try:
        found = from_json(content)
    except ValueError as error:
        fault = str(error)
        if fault.startswith(_TOO_DEEP):
            place = fault.removeprefix(_TOO_DEEP).strip()
            raise InvalidModelFile(f"{name} is nested more than {_MOST_DEPTH} levels deep, {place}") from error
        raise InvalidModelFile(f"{name} is not valid JSON: {fault}") from error
    if not isinstance(found, dict):
        raise InvalidModelFile(f"{name} must be a JSON object, not {_KINDS.get(type(found), 'a number')}")
    return found


def _unique(name: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise InvalidModelFile(f"{name} has the key {json.dumps(twice)} more than once in one object")
    return found


def _numbers(found: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield all numbers with a fraction or an exponent, and their places."""
    waiting: list[tuple[str, Any]] = [("", found)]
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, float):
            yield place, value
        elif isinstance(value, dict):
            waiting += [(f"{place}.{key}" if place else key, part) for key, part in value.items()]
        elif isinstance(value, list):
            waiting += [(f"{place}[{at}]", part) for at, part in enumerate(value)]
