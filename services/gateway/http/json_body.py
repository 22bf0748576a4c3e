"""JSON as a server has to read it: nothing in it is ambiguous, and nothing in it can exhaust the reader."""

import json
import re
from collections import Counter
from typing import Any, NoReturn

MOST_DEPTH = 64

# Strings are passed over whole; no part of this ever goes back over what it has read.
_STRING_OR_BRACKET = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?+|[\[\]{}]', re.DOTALL)

_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")


class MalformedJson(ValueError):
    """A body that is no JSON, or that nobody should have to read; the message says why."""


def parse(body: bytes) -> Any:
    """Read a JSON text in UTF-8. Raises MalformedJson.

    Refused is also what the standard leaves open: a key that comes twice, NaN, and more than `MOST_DEPTH` levels.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise MalformedJson(f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    _check_depth(text)
    try:
        value = _DECODER.decode(text)
        if _HALF_CHARACTER.search(text):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError as error:
        raise MalformedJson("the body has one half of a surrogate pair without the other") from error
    except json.JSONDecodeError as error:
        raise MalformedJson(f"the body is not JSON: {error}") from error
    except MalformedJson:
        raise
    except ValueError as error:  # an integer of thousands of digits
        raise MalformedJson(f"the body has a number that cannot be read: {error}") from error


def _check_depth(text: str) -> None:
    """Count before parsing: parsers call themselves for each level."""
    if text.count("[") + text.count("{") <= MOST_DEPTH:
        return
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        match match[0]:
            case "[" | "{":
                depth += 1
                if depth > MOST_DEPTH:
                    raise MalformedJson(f"the body is nested more than {MOST_DEPTH} levels deep")
            case "]" | "}":
                depth -= 1


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise MalformedJson(f"the key {twice[:100]!r} comes twice in one object")
    return members


def _no_constant(name: str) -> NoReturn:
    raise MalformedJson(f"{name} is no number of JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)
