"""Plain messages for what pydantic finds wrong with a JSON body."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from pydantic_core import ErrorDetails

_Location = tuple[int | str, ...]

_KINDS = {  # pydantic's error types, and what they expect
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
    "dataclass_type": "an object",
}
_BOUNDS = {"greater_than_equal": "at least {ge}", "less_than_equal": "at most {le}", "greater_than": "above {gt}"}
_RANGES = {bound: f"between {-bits} and {bits - 1}" for bits in (2**31, 2**63) for bound in (-bits, bits - 1)}
_MAX_SHOWN = 80


@dataclass(frozen=True)
class InvalidPart:
    """The invalid part of a body: its location as keys and indices, pydantic's error type, and the message."""

    location: _Location
    kind: str
    message: str

    @property
    def path(self) -> str:
        """The location as a path such as `messages[0].role`; empty for the body."""
        return path_of(self.location)

    @property
    def is_value(self) -> bool:
        """Whether the type is right, and the value is not."""
        return self.kind not in _KINDS


def invalid_part(found: Iterable[ErrorDetails], body: Any, skipped: int = 0) -> InvalidPart:
    """Choose the error to report. Of a union type, the members that match the longest are reported.

    `skipped` is the number of leading parts of pydantic's locations that are not in the body.
    """
    errors = [(_location(one["loc"][skipped:], body, missing=one["type"] == "missing"), one) for one in found]
    first = errors[0][0][:1]
    by_member = [
        list(errors_of_member)
        for _, errors_of_member in groupby((one for one in errors if one[0][:1] == first), key=_member)
    ]
    depth = max(len(location) for member in by_member for location, _ in member)
    deepest = [member for member in by_member if any(len(location) == depth for location, _ in member)]
    fewest = min(len(member) for member in deepest)
    reported = [member[0] for member in deepest if len(member) == fewest]
    location = max((place for place, _ in reported), key=_order)
    return _part(location, [one for place, one in reported if place == location])


def path_of(location: Sequence[int | str]) -> str:
    """Return a location as a path such as `messages[0].role`, long keys cut."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part[:_MAX_SHOWN]}" for part in location)
    return "".join(parts).removeprefix(".")


def shown(value: Any) -> str:
    """Return a value as JSON, cut to a length that fits into a message."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _member(error: tuple[_Location, ErrorDetails]) -> tuple[int | str, ...]:
    """Return the parts of pydantic's location that name members of union types."""
    location, details = error
    return tuple(part for part in details["loc"] if part not in location)


def _order(location: _Location) -> tuple[int, ...]:
    return tuple(part for part in location if isinstance(part, int))


def _part(location: _Location, errors: Sequence[ErrorDetails]) -> InvalidPart:
    kind, value = errors[0]["type"], errors[0]["input"]
    name = path_of(location) or "the body"
    match kind:
        case "missing":
            message = f"{name} is missing"
        case "extra_forbidden":
            message = f"{name if location != ('',) else shown('')} is not a field of this request"
        case "none_required":
            message = f"{name} is not supported"
        case "union_tag_not_found":
            return InvalidPart((*location, _tag(errors[0])), "missing", f"{_tag(errors[0])} is missing")
        case "union_tag_invalid":
            tags = errors[0]["ctx"]["expected_tags"].replace("'", "")
            message = f"{_tag(errors[0])} must be one of {tags}, not {shown(errors[0]['ctx']['tag'])}"
            return InvalidPart((*location, _tag(errors[0])), kind, message)
        case _:
            rules = dict.fromkeys(rule for one in errors if (rule := _rule(one)))
            message = f"{name} must be {' or '.join(rules)}, not {shown(value)}"
            if not rules:
                message = f"{name} is invalid: {errors[0]['msg']}"
    return InvalidPart(location, kind, message)


def _tag(error: ErrorDetails) -> str:
    return str(error["ctx"]["discriminator"]).strip("'")


def _rule(error: ErrorDetails) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind == "literal_error":
        return str(context["expected"]).replace("True", "true").replace("'", '"')
    if kind in _BOUNDS:
        return _RANGES.get(next(iter(context.values())), _BOUNDS[kind].format_map(context))
    return _KINDS.get(kind, "")


def _location(location: Sequence[int | str], body: Any, *, missing: bool) -> _Location:
    """Return the location of an error in the body. Pydantic's location also has the members of union types."""
    parts: list[int | str] = []
    for part in location:
        if (isinstance(body, Mapping) and part in body) or (isinstance(body, list) and isinstance(part, int)):
            parts.append(part)
            body = body[part]  # type: ignore[index]
    return (*parts, *location[-1:]) if missing else tuple(parts)
