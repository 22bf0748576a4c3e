"""Translates pydantic's errors to plain messages about a JSON body."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from blocks import counted

MAX_SHOWN = 80
# The type of errors that schemas raise for a value that is not supported; the message is the reason.
UNSUPPORTED = "unsupported"
# The type of errors whose message is what the value must be.
EXPECTED = "expected"

_MISSING = "missing"
_EXPECTED = {  # pydantic's error type: what the value must be
    "string_type": "a string",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "list_type": "an array",
    "tuple_type": "an array",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
_LISTS = {  # the members of union types
    "list[str]": "an array of strings",
    "list[int]": "an array of integers",
    "list[list[int]]": "an array of such arrays",
}
# Types of errors for values that are not one of a few, so that the given one is no text of a user.
_OF_FEW_VALUES = ("literal_error", "enum")
_JSON_WORDS = {"True": "true", "False": "false", "None": "null"}
_RANGES = ((-(2**31), 2**31 - 1), (-(2**63), 2**63 - 1))


class Violation(NamedTuple):
    """An invalid field: its path in the body (empty for the body itself), a message and an error code."""

    path: str
    message: str
    code: str


class _Found(NamedTuple):
    location: tuple[int | str, ...]
    members: tuple[int | str, ...]
    error: Mapping[str, Any]


def violation(errors: Sequence[Mapping[str, Any]], body: Any) -> Violation:
    """Describe the first invalid field of pydantic's `errors`, whose locations start at `body`."""
    found = [_find(error, body) for error in errors]
    found = [one for one in found if one.location[:1] == found[0].location[:1]]
    # A union type has errors of each member. The member that matched furthest is meant.
    first: dict[tuple[int | str, ...], _Found] = {}
    for one in found:
        first.setdefault(one.members, one)
    furthest = max((_order(one) for one in first.values()), default=())
    meant = [one for one in first.values() if _order(one) == furthest]
    return _describe(meant)


def shown(value: Any) -> str:
    """Return a value as JSON, cut to `MAX_SHOWN` characters."""
    text = ""
    if isinstance(value, str):
        value = value[: MAX_SHOWN + 1]
    try:
        for part in json.JSONEncoder(ensure_ascii=False).iterencode(value):
            text += part
            if len(text) > MAX_SHOWN:
                return f"{text[:MAX_SHOWN]}..."
    except ValueError:  # an integer of thousands of digits
        return "an integer of too many digits"
    return text


def _find(error: Mapping[str, Any], body: Any) -> _Found:
    parts: list[int | str] = []
    members: list[int | str] = []
    location = error["loc"]
    missing = location[-1:] if error["type"] == _MISSING else ()
    for part in location[: len(location) - len(missing)]:
        if (isinstance(body, Mapping) and part in body) or (isinstance(body, list) and isinstance(part, int)):
            parts.append(part)
            body = body[part]
        else:
            members.append(part)
    return _Found((*parts, *missing), tuple(members), error)


def _order(found: _Found) -> tuple[int, ...]:
    return tuple(part if isinstance(part, int) else 0 for part in found.location)


def _describe(meant: Sequence[_Found]) -> Violation:
    location, error = meant[0].location, meant[0].error
    path = "".join(map(_step, location)).removeprefix(".")
    name = path or "the body"
    match error["type"]:
        case "missing":
            return Violation(path, f"{name} is missing", "missing")
        case "extra_forbidden":
            known = path if not location[-1] or str(location[-1]).isidentifier() else shown(path)
            return Violation(path, f"{known} is not a field of this request", "unknown_parameter")
        case "none_required":
            return Violation(path, f"{name} is not supported", "unsupported_value")
        case _ if error["type"] == UNSUPPORTED:
            return Violation(path, f"{name} is not supported: {error['msg']}", "unsupported_value")
        case "union_tag_not_found":
            tag = _tag(path, error)
            return Violation(tag, f"{tag} is missing", "missing")
        case "union_tag_invalid":
            tag, tags = _tag(path, error), error["ctx"]["expected_tags"].replace("'", "")
            return Violation(tag, f"{tag} must be one of {tags}, not {shown(error['ctx']['tag'])}", "invalid_value")
    code = "invalid_type" if error["type"] in _EXPECTED else "invalid_value"
    expected = list(dict.fromkeys(_expected(one) for one in meant))
    *others, last = expected
    either = f"{', '.join(others)} or {last}" if others else last
    given = error.get("input")
    described = shown(given) if error["type"] in _OF_FEW_VALUES else _described(given)
    return Violation(path, f"{name} must be {either}, not {described}", code)


def _step(part: int | str) -> str:
    if isinstance(part, int):
        return f"[{part}]"
    return f".{_cut(part)}" if part else '[""]'


def _described(value: Any) -> str:
    """Describe a value without its text, which may be a prompt."""
    match value:
        case str():
            return f"a string of {counted(len(value), 'character')}"
        case list():
            return f"an array of {len(value)} {'entry' if len(value) == 1 else 'entries'}"
        case dict():
            return "an object"
    return shown(value)


def _expected(found: _Found) -> str:
    error = found.error
    kind, context = error["type"], error.get("ctx", {})
    if kind == "list_type" and len(found.location) == 1:
        return _LISTS.get(str(*found.members[:1]), _EXPECTED[kind])
    if kind == "literal_error":
        return _JSON_WORDS.get(context["expected"], str(context["expected"]).replace("'", '"'))
    for key, size in (("max_length", "at most"), ("min_length", "at least")):
        if key in context:
            kinds = "a string of {} characters" if kind.startswith("string") else "an array of {} entries"
            return kinds.format(f"{size} {context[key]}")
    for key, half in (("ge", "at least"), ("le", "at most"), ("gt", "above"), ("lt", "below")):
        if key in context:
            bounds = next((one for one in _RANGES if context[key] == one[key == "le"]), None)
            return f"between {bounds[0]} and {bounds[1]}" if bounds else f"{half} {_number(context[key])}"
    if kind == EXPECTED:
        return str(error["msg"])
    return _EXPECTED.get(kind, f"valid ({error['msg']})")


def _number(bound: Any) -> str:
    return f"{bound:g}" if isinstance(bound, float) else str(bound)


def _tag(path: str, error: Mapping[str, Any]) -> str:
    """Return the path of the member that tells the members of a union type apart."""
    name = str(error["ctx"]["discriminator"]).strip("'")
    return f"{path}.{name}".removeprefix(".")


def _cut(part: str) -> str:
    return part if len(part) <= MAX_SHOWN else f"{part[:MAX_SHOWN]}..."
