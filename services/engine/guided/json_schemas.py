"""Prepares clients' JSON schemas for llguidance: checks each keyword, and makes numbers representable.

llguidance ignores unknown keywords, and reads every number as a double: 9007199254740993 would become
9007199254740992. So each keyword must be enforced or an annotation; all others are refused with their path. Each
number must be exact as a double; other bounds move inwards to the next double, other constants are refused.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

from services.engine.guided.schema_numbers import (
    DecimalLiteral,
    Unrepresentable,
    admits_excluded_bound,
    exact_multiple,
    inner_bound,
    is_representable,
    lcm_overflows,
    tighten_bound,
)

_Node = dict[str, Any]

_SUBSCHEMAS = ("additionalProperties", "additionalItems", "items")  # one schema
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")  # a list of them
_MAPS = ("properties", "patternProperties", "$defs", "definitions")  # named ones
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
_NAMING = ("$id", "id", "$anchor")
_META_SCHEMAS = ("http://json-schema.org/", "https://json-schema.org/")  # llguidance has them
_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_DRAFTS = re.compile(r"https?://json-schema\.org/(draft-0[467]|draft/2019-09|draft/2020-12)/schema#?")
_IDENTIFIERS = ("$schema", "$id", "id", "$anchor", "$defs", "definitions")

ENFORCED = frozenset(
    {*_IDENTIFIERS, *_SUBSCHEMAS, *_LISTS, *_MAPS, *_LOWER, *_UPPER, *_COUNTS}
    | {"$ref", "const", "enum", "type", "required", "pattern", "format", "multipleOf", "nullable"}
)
ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "example", "$comment", "deprecated", "readOnly", "writeOnly"}
    | {"contentEncoding", "contentMediaType", "contentSchema", "discriminator", "externalDocs", "xml"}
)
UNSUPPORTED = frozenset(
    {"not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames"}
    | {"dependencies", "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties"}
    | {"$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "$vocabulary", "x-guidance"}
)
# Keywords that llguidance enforces, but that have no meaning in these drafts.
_UNKNOWN_TO = {"draft-04": ("const", "prefixItems"), "draft-06": ("prefixItems",), "draft-07": ("prefixItems",)}
_MAX_COUNTED = 2**32
_MAX_VALUE_LENGTH = 60


class InvalidSchema(ValueError):
    """The schema is refused; the message names the place as a JSON pointer."""


def prepare_schema(text: str) -> str:
    """Return a schema for llguidance whose texts are all valid under the schema `text`.

    Raises InvalidSchema, ValueError for malformed JSON, or RecursionError.
    """
    schema = json.loads(text, parse_float=DecimalLiteral, parse_constant=_refuse_constant)
    if schema is True:
        return "{}"  # equivalent, and accepts options
    if not isinstance(schema, dict):
        raise InvalidSchema("no output matches it" if schema is False else "a schema must be an object or a boolean")
    _SchemaPreparation(schema).run()
    return json.dumps(schema, allow_nan=False)


def _refuse_constant(name: str) -> None:
    raise InvalidSchema(f"{name} is not a JSON number")


class _SchemaPreparation:
    """Prepares one schema in place."""

    def __init__(self, root: _Node) -> None:
        self._root = root
        self._seen: set[int] = set()
        self._annotations: list[tuple[_Node, str]] = []
        self._passed: set[tuple[int, str]] = set()
        self._multiples: list[Fraction] = []
        self._bounded: list[tuple[_Node, str]] = []
        self._references: list[tuple[object, str]] = []
        self._has_names = False
        self._intersects = False

    def run(self) -> None:
        self._visit(self._root, "#")
        self._check_references()
        for node, keyword in self._annotations:  # at the end, because references may lead through them
            if (id(node), keyword) not in self._passed:
                del node[keyword]
        if self._intersects and lcm_overflows(self._multiples):
            raise InvalidSchema("multipleOf: the least common multiple of the schema's values has too many digits")
        # If schemas intersect, any bound may meet any other.
        everywhere = [node for node, _ in self._bounded] if self._intersects else None
        meeting = [_bounds(everywhere or [], keywords) for keywords in (_LOWER, _UPPER)]
        for node, path in self._bounded:
            lower, upper = meeting if everywhere else [_bounds([node], keywords) for keywords in (_LOWER, _UPPER)]
            _include(node, path, _LOWER, upper)
            _include(node, path, _UPPER, lower)

    def _visit(self, node: object, path: str) -> None:
        if not isinstance(node, dict) or id(node) in self._seen:
            return  # llguidance finds what is not a schema at all
        self._seen.add(id(node))
        for keyword in list(node):
            self._check_keyword(node, keyword, f"{path}/{pointer_part(keyword)}")
        _check_draft(node, path)
        _check_types(node, path)
        _check_values(node, path)
        _add_null(node, path)
        _move_bounds(node, path)
        if any(keyword in node for keyword in (*_LOWER, *_UPPER)):
            self._bounded.append((node, path))
        _check_counts(node, path)
        self._note_multiple(node, path)
        applied = [keyword for keyword in ("allOf", "anyOf", "oneOf", "$ref") if keyword in node]
        self._intersects |= "allOf" in applied or bool(applied and len(node) > 1) or "patternProperties" in node
        for child, where in children(node, path):
            self._visit(child, where)
        self._has_names |= any(isinstance(node.get(keyword), str) for keyword in _NAMING)
        if "$ref" in node:
            self._references.append((node["$ref"], f"{path}/$ref"))
        if isinstance(reference := node.get("$ref"), str) and reference.startswith("#/"):
            self._visit(self._resolved(reference), reference)

    def _check_references(self) -> None:
        """Check that references lead into the schema. llguidance checks those by the names of its parts."""
        for reference, path in self._references:
            if not isinstance(reference, str):
                raise InvalidSchema(f"{path} must be a string, not {_shown(reference)}")
            inside = reference in ("", "#") or self._has_names or reference.startswith(_META_SCHEMAS)
            if not inside and (not reference.startswith("#/") or self._resolved(reference) is None):
                raise InvalidSchema(f"{path} is {_shown(reference)}, which is not in the schema")

    def _check_keyword(self, node: _Node, keyword: str, path: str) -> None:
        annotates = keyword in ANNOTATIONS or (keyword.startswith("x-") and keyword not in UNSUPPORTED)
        if annotates or (keyword == "uniqueItems" and node[keyword] is False):
            self._annotations.append((node, keyword))
        elif keyword in UNSUPPORTED:
            raise InvalidSchema(f"{path}: {keyword} is not supported")
        elif keyword not in ENFORCED:
            near = get_close_matches(keyword, ENFORCED, 1, 0.75)
            hint = f"; did you mean {near[0]}?" if near else "; custom annotations begin with x-"
            raise InvalidSchema(f"{path}: {keyword[:_MAX_VALUE_LENGTH]} is not a JSON schema keyword{hint}")
        for draft, unknown in _UNKNOWN_TO.items():
            if keyword in unknown and draft in str(self._root.get("$schema", "")):
                raise InvalidSchema(f"{path}: {keyword} is not a keyword of {draft}, which $schema declares")

    def _note_multiple(self, node: _Node, path: str) -> None:
        if "multipleOf" not in node:
            return
        try:
            self._multiples.append(exact_multiple(node["multipleOf"]))
        except Unrepresentable as error:
            raise InvalidSchema(f"{path}/multipleOf is {_shown(node['multipleOf'])}, {error}") from error

    def _resolved(self, reference: str) -> object:
        """Return the target of a local reference; None if there is none."""
        place: object = self._root
        for part in reference[2:].split("/"):
            name = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(place, dict):
                self._passed.add((id(place), name))
                place = place.get(name)
            elif isinstance(place, list) and name.isdecimal() and int(name) < len(place):
                place = place[int(name)]
            else:
                return None
        return place


def children(node: _Node, path: str) -> Iterator[tuple[object, str]]:
    """Yield the schemas in a schema, with their paths; None for a keyword that is missing."""
    for keyword in _SUBSCHEMAS:
        yield node.get(keyword), f"{path}/{keyword}"
    for keyword in _LISTS:
        if isinstance(parts := node.get(keyword), list):
            yield from ((part, f"{path}/{keyword}/{number}") for number, part in enumerate(parts))
    for keyword in _MAPS:
        if isinstance(named := node.get(keyword), dict):
            yield from ((part, f"{path}/{keyword}/{pointer_part(name)}") for name, part in named.items())


def _check_draft(node: _Node, path: str) -> None:
    """Check that llguidance has the meta-schema that `$schema` names: nothing is retrieved."""
    draft = node.get("$schema", _DRAFT)
    if not isinstance(draft, str) or not _DRAFTS.fullmatch(draft):
        raise InvalidSchema(f'{path}/$schema must be that of draft 4 or later, such as "{_DRAFT}", not {_shown(draft)}')


def _check_types(node: _Node, path: str) -> None:
    types = node.get("type", [])
    for one in types if isinstance(types, list) else [types]:
        if one not in _TYPES:
            raise InvalidSchema(f"{path}/type must be one or several of {', '.join(_TYPES)}, not {_shown(one)}")
    for keyword in ("type", "enum", "allOf", "anyOf", "oneOf"):
        if node.get(keyword) == []:
            raise InvalidSchema(f"{path}/{keyword} must have at least one entry")


def _check_values(node: _Node, path: str) -> None:
    for keyword in ("const", "enum"):
        for number, where in _numbers(node.get(keyword), f"{path}/{keyword}"):
            if not is_representable(number):
                raise InvalidSchema(
                    f"{where} is {_shown(number)}, which has more digits than a double can represent; "
                    "use a string or a regex"
                )


def _numbers(value: object, path: str) -> Iterator[tuple[int | float, str]]:
    """Yield the numbers in a value, with their paths."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _numbers(part, f"{path}/{pointer_part(name)}")
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from _numbers(part, f"{path}/{number}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value, path


def _add_null(node: _Node, path: str) -> None:
    """Replace `nullable` of OpenAPI 3.0 by null in the type next to it."""
    if "nullable" not in node:
        return
    nullable, types = node.pop("nullable"), node.get("type")
    if not isinstance(nullable, bool):
        raise InvalidSchema(f"{path}/nullable must be true or false, not {_shown(nullable)}")
    if nullable:
        if not isinstance(types, str | list):
            raise InvalidSchema(f"{path}/nullable needs a type next to it")
        listed = [types] if isinstance(types, str) else types
        node["type"] = listed if "null" in listed else [*listed, "null"]


def _move_bounds(node: _Node, path: str) -> None:
    """Move bounds that are not exact as a double inwards, to the next double."""
    for keywords, upwards in ((_LOWER, True), (_UPPER, False)):
        for keyword in keywords:
            bound = node.get(keyword)
            if isinstance(bound, bool) or not isinstance(bound, int | float):
                continue
            try:
                node[keyword] = tighten_bound(bound, upwards=upwards, exclusive=keyword.startswith("exclusive"))
            except Unrepresentable as error:
                raise InvalidSchema(f"{path}/{keyword} is {_shown(bound)}, {error}") from error
    least, most = _tightest(node, _LOWER, max), _tightest(node, _UPPER, min)
    if least > most:
        raise InvalidSchema(f"{path}: no double lies between its bounds")


def _include(node: _Node, path: str, keywords: tuple[str, str], opposites: list[float]) -> None:
    """Replace an excluded bound that llguidance would admit by an included bound inside it."""
    (included, excluded), upwards = keywords, keywords is _LOWER
    for bound in _bounds([node], (excluded,)):
        near = [one for one in opposites if admits_excluded_bound(bound, one, upwards=upwards)]
        if not near:
            continue
        try:
            moved = inner_bound(bound, min(near, key=lambda one: abs(one - bound)))
        except Unrepresentable as error:
            raise InvalidSchema(f"{path}/{excluded} is {_shown(bound)}, {error}") from error
        del node[excluded]
        node[included] = (max if upwards else min)([moved, *_bounds([node], (included,))])


def _bounds(nodes: list[_Node], keywords: tuple[str, ...]) -> list[float]:
    bounds = [node.get(one) for node in nodes for one in keywords]
    return [bound for bound in bounds if isinstance(bound, int | float) and not isinstance(bound, bool)]


def _tightest(node: _Node, keywords: tuple[str, str], choose: Callable[..., float]) -> float:
    return choose(_bounds([node], keywords), default=-math.inf if choose is max else math.inf)


def _check_counts(node: _Node, path: str) -> None:
    for keyword in _COUNTS:
        if keyword not in node:
            continue
        count = node[keyword]
        if isinstance(count, bool) or not isinstance(count, int | float) or count < 0 or count != math.floor(count):
            raise InvalidSchema(f"{path}/{keyword} must be a non-negative integer, not {_shown(count)}")
        if count < _MAX_COUNTED:
            node[keyword] = int(count)
        elif keyword.startswith("max"):
            del node[keyword]  # no output is that long
        else:
            raise InvalidSchema(f"{path}/{keyword} is {_shown(count)}, which no output reaches")


def pointer_part(name: str) -> str:
    """Return a name as it is written in a JSON pointer, shortened."""
    return name[:_MAX_VALUE_LENGTH].replace("~", "~0").replace("/", "~1")


def _shown(value: object) -> str:
    text = value.text if isinstance(value, DecimalLiteral) else json.dumps(value)
    return text if len(text) <= _MAX_VALUE_LENGTH else f"{text[:_MAX_VALUE_LENGTH]}..."
