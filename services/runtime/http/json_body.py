"""A strict JSON parser for untrusted input: no ambiguous values, and bounded work."""

import json
import re
import sys
from collections import Counter
from typing import Any, NoReturn

from services.runtime.errors import InvalidField

MAX_DEPTH = 64
# Each costs up to some 20 us until a schema refuses it, and all other calls wait meanwhile. A chat of 8,192 messages
# with one part each has 24,578 arrays and objects; a bias for each token of a vocabulary has as many keys.
MAX_CONTAINERS = 32_768
MAX_KEYS = 262_144

# Possessive quantifiers, so that the search never backtracks.
_ANY_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?+'
_STRING = re.compile(_ANY_STRING, re.DOTALL)
_STRING_OR_BRACKET = re.compile(_ANY_STRING + r"|[\[\]{}]", re.DOTALL)

_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


class MalformedJson(ValueError):
    """A body that is not valid JSON, or is beyond the parser's bounds."""


def parse(body: bytes, name: str = "the body", depth: int = MAX_DEPTH) -> Any:
    """Parse UTF-8 JSON. Raises MalformedJson, whose message calls the input `name`.

    Also rejects duplicate keys, unpaired surrogates, NaN and Infinity, more than `depth` levels, and more than
    MAX_CONTAINERS arrays and objects or MAX_KEYS keys.
    """
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise MalformedJson(f"{name} is not UTF-8: {error.reason} at byte {error.start}") from error
    if _depth(text, depth) > depth:
        raise MalformedJson(f"{name} must be nested at most {depth} levels deep")
    _check_counts(text, name)
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


def _check_counts(text: str, name: str) -> None:
    """Raise MalformedJson for too many arrays, objects and keys, before anything is made of them."""
    if _containers(text) <= MAX_CONTAINERS and text.count(":") <= MAX_KEYS:
        return
    bare = _STRING.sub("", text)
    if _containers(bare) > MAX_CONTAINERS:
        raise MalformedJson(f"{name} must have at most {MAX_CONTAINERS} arrays and objects")
    if bare.count(":") > MAX_KEYS:
        raise MalformedJson(f"{name} must have at most {MAX_KEYS} keys")


def _containers(text: str) -> int:
    return text.count("[") + text.count("{")


def _depth(text: str, most: int) -> int:
    """Return how deep arrays and objects are nested; 0 if there are at most `most`. Counting stops above `most`.

    It also stops after MAX_CONTAINERS arrays and objects. It comes before parsing, because the parser recurses.
    """
    if _containers(text) <= most:
        return 0
    depth = deepest = opened = 0
    for match in _STRING_OR_BRACKET.finditer(text):
        match match[0]:
            case "[" | "{":
                depth += 1
                opened += 1
                if (deepest := max(deepest, depth)) > most or opened > MAX_CONTAINERS:
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
