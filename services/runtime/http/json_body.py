"""A strict JSON parser for untrusted input: no ambiguous values, and bounded work."""

import json
import re
import sys
from collections import Counter
from typing import Any, NoReturn

from services.runtime.errors import InvalidField

MAX_DEPTH = 64

# Possessive quantifiers, so that the search never backtracks.
_STRING_OR_BRACKET = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?+|[\[\]{}]', re.DOTALL)

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


class MalformedJson(ValueError):
    """A body that is not valid JSON, or is beyond the parser's bounds."""


def parse(body: bytes, name: str = "the body", depth: int = MAX_DEPTH) -> Any:
    """Parse UTF-8 JSON. Raises MalformedJson, whose message calls the input `name`.

    Also rejects duplicate keys, unpaired surrogates, NaN and Infinity, and more than `depth` levels.
    """
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise MalformedJson(f"{name} is not UTF-8: {error.reason} at byte {error.start}") from error
    if _depth(text, depth) > depth:
        raise MalformedJson(f"{name} must be nested at most {depth} levels deep")
    try:
        value = _DECODER.decode(text)
        if _SURROGATE_ESCAPE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError as error:
        raise MalformedJson(f"{name} has an unpaired surrogate") from error
    except json.JSONDecodeError as error:
        raise MalformedJson(f"{name} is not JSON: {error}") from error
    except MalformedJson:
        raise
    except ValueError as error:
        raise MalformedJson(f"{name} has an integer of more than {sys.get_int_max_str_digits()} digits") from error


def parse_text(text: str, field: str) -> Any:
    """Parse the JSON text of a field, by the rules of `parse`. Raises InvalidField."""
    try:
        return parse(text.encode(), field)
    except MalformedJson as error:
        message = str(error)
        raise InvalidField(message if message.startswith(field) else f"{field}: {message}", field) from error


def _depth(text: str, most: int) -> int:
    """Return the levels of a text, or a number above `most` if it has more; 0 if it has few brackets.

    They are counted before parsing, because the parser recurses at each level.
    """
    if text.count("[") + text.count("{") <= most:
        return 0
    depth = deepest = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        match match[0]:
            case "[" | "{":
                depth += 1
                if (deepest := max(deepest, depth)) > most:
                    break
            case "]" | "}":
                depth -= 1
    return deepest


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        duplicate = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise MalformedJson(f"the key {duplicate[:100]!r} is duplicated in one object")
    return members


def _reject_constant(name: str) -> NoReturn:
    raise MalformedJson(f"{name} is not a valid JSON number")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_reject_constant)
