"""A strict JSON parser for untrusted input: no ambiguous values, and bounded work."""

import json
import re
import sys
from collections import Counter
from typing import Any, NoReturn

MAX_DEPTH = 64

# Possessive quantifiers, so that the search never backtracks.
_STRING_OR_BRACKET = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?+|[\[\]{}]', re.DOTALL)

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


class MalformedJson(ValueError):
    """A body that is not valid JSON, or is beyond the parser's bounds."""


def parse(body: bytes) -> Any:
    """Parse UTF-8 JSON. Raises MalformedJson.

    Also rejects duplicate keys, NaN and Infinity, and more than `MAX_DEPTH` levels.
    """
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise MalformedJson(f"the body is not UTF-8: {error.reason} at byte {error.start}") from error
    _check_depth(text)
    try:
        value = _DECODER.decode(text)
        if _SURROGATE_ESCAPE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError as error:
        raise MalformedJson("the body has an unpaired surrogate") from error
    except json.JSONDecodeError as error:
        raise MalformedJson(f"the body is not JSON: {error}") from error
    except MalformedJson:
        raise
    except ValueError as error:
        raise MalformedJson(f"the body has an integer of more than {sys.get_int_max_str_digits()} digits") from error


def _check_depth(text: str) -> None:
    # Counted before parsing, because the parser recurses at each level.
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    depth = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        match match[0]:
            case "[" | "{":
                depth += 1
                if depth > MAX_DEPTH:
                    raise MalformedJson(f"the body must be nested at most {MAX_DEPTH} levels deep")
            case "]" | "}":
                depth -= 1


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        duplicate = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise MalformedJson(f"the key {duplicate[:100]!r} is duplicated in one object")
    return members


def _reject_constant(name: str) -> NoReturn:
    raise MalformedJson(f"{name} is not a valid JSON number")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_reject_constant)
