"""JSON schemas as clients write them, made ready for llguidance: checked keyword by keyword, numbers as exact as it is.

llguidance ignores keywords that it does not know, and reads every number as a double: 9007199254740993 would come out
as 9007199254740992. So each keyword is one that is enforced, an annotation, or refused by its path; and each number is
one that a double holds, digit for digit, is moved inwards to such a number where it is a bound, or is refused by path.
"""

import json
import math
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

from services.engine.guided.schema_numbers import (
    NotHeld,
    Written,
    admitted_excluded_bound,
    held_multiple,
    inward,
    is_held,
    just_inside,
    lcm_overflows,
)

_Node = dict[str, Any]

_SUBSCHEMAS = ("additionalProperties", "additionalItems", "items")  # one schema
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")  # a list of them
_MAPS = ("properties", "patternProperties", "$defs", "definitions")  # named ones
_LOWER, _UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_IDENTIFIERS = ("$schema", "$id", "id", "$anchor", "$defs", "definitions")

ENFORCED = frozenset(
    {*_IDENTIFIERS, *_SUBSCHEMAS, *_LISTS, *_MAPS, *_LOWER, *_UPPER, *_COUNTS}
    | {"$ref", "const", "enum", "type", "required", "pattern", "format", "multipleOf", "nullable"}
)
ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "example", "$comment", "deprecated", "readOnly", "writeOnly"}
    | {"contentEncoding", "contentMediaType", "contentSchema", "discriminator", "externalDocs", "xml"}
)
REFUSED = frozenset(
    {"not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames"}
    | {"dependencies", "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties"}
    | {"$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "$vocabulary", "x-guidance"}
)
# Keywords that llguidance follows, but not in schemas of these drafts, where they mean nothing.
_UNKNOWN_TO = {"draft-04": ("const", "prefixItems"), "draft-06": ("prefixItems",), "draft-07": ("prefixItems",)}
_MOST_COUNTED = 2**32
_LONGEST_VALUE = 60


class BadSchema(ValueError):
    """A schema that is refused; the message names the place, as a JSON pointer."""


def prepared(text: str) -> str:
    """Return a schema that llguidance compiles to a language of texts that are valid under `text`.

    Raises BadSchema, ValueError where it is no JSON, or RecursionError.
    """
    schema = json.loads(text, parse_float=Written, parse_constant=_refuse_constant)
    if schema is True:
        return "{}"  # the same, and options can be applied to it
    if not isinstance(schema, dict):
        raise BadSchema("no output belongs to it" if schema is False else "a schema is an object or a boolean")
    _Preparation(schema).run()
    return json.dumps(schema, allow_nan=False)


def _refuse_constant(name: str) -> None:
    raise BadSchema(f"{name} is no number of JSON")


class _Preparation:
    """One schema on its way. Changes it in place."""

    def __init__(self, root: _Node) -> None:
        self._root = root
        self._seen: set[int] = set()
        self._annotations: list[tuple[_Node, str]] = []
        self._passed: set[tuple[int, str]] = set()
        self._multiples: list[Fraction] = []
        self._bounded: list[tuple[_Node, str]] = []
        self._intersects = False

    def run(self) -> None:
        self._visit(self._root, "#")
        for node, keyword in self._annotations:  # only now: references may lead through them
            if (id(node), keyword) not in self._passed:
                del node[keyword]
        if self._intersects and lcm_overflows(self._multiples):
            raise BadSchema("multipleOf: the least common multiple of those in this schema has too many digits")
        # Where schemas meet, a bound can meet each other one.
        everywhere = [node for node, _ in self._bounded] if self._intersects else None
        meeting = [_bounds(everywhere or [], keywords) for keywords in (_LOWER, _UPPER)]
        for node, path in self._bounded:
            lower, upper = meeting if everywhere else [_bounds([node], keywords) for keywords in (_LOWER, _UPPER)]
            _include(node, path, _LOWER, upper)
            _include(node, path, _UPPER, lower)

    def _visit(self, node: object, path: str) -> None:
        if not isinstance(node, dict) or id(node) in self._seen:
            return  # what is no schema at all is found by llguidance
        self._seen.add(id(node))
        for keyword in list(node):
            self._check_keyword(node, keyword, f"{path}/{_escaped(keyword)}")
        _check_values(node, path)
        _add_null(node, path)
        _move_bounds(node, path)
        if any(keyword in node for keyword in (*_LOWER, *_UPPER)):
            self._bounded.append((node, path))
        _check_counts(node, path)
        self._note_multiple(node, path)
        applied = [keyword for keyword in ("allOf", "anyOf", "oneOf", "$ref") if keyword in node]
        self._intersects |= "allOf" in applied or bool(applied and len(node) > 1) or "patternProperties" in node
        for child, where in _children(node, path):
            self._visit(child, where)
        if isinstance(reference := node.get("$ref"), str) and reference.startswith("#/"):
            self._visit(self._resolved(reference), reference)

    def _check_keyword(self, node: _Node, keyword: str, path: str) -> None:
        annotates = keyword in ANNOTATIONS or (keyword.startswith("x-") and keyword not in REFUSED)
        if annotates or (keyword == "uniqueItems" and node[keyword] is False):
            self._annotations.append((node, keyword))
        elif keyword in REFUSED:
            raise BadSchema(f"{path}: {keyword} is not supported")
        elif keyword not in ENFORCED:
            near = get_close_matches(keyword, ENFORCED, 1, 0.75)
            hint = f"; is {near[0]} meant?" if near else "; annotations of your own begin with x-"
            raise BadSchema(f"{path}: {keyword[:_LONGEST_VALUE]} is no keyword of JSON schemas{hint}")
        for draft, unknown in _UNKNOWN_TO.items():
            if keyword in unknown and draft in str(self._root.get("$schema", "")):
                raise BadSchema(f"{path}: {keyword} is no keyword of {draft}, which $schema names")

    def _note_multiple(self, node: _Node, path: str) -> None:
        if "multipleOf" not in node:
            return
        try:
            self._multiples.append(held_multiple(node["multipleOf"]))
        except NotHeld as error:
            raise BadSchema(f"{path}/multipleOf is {_shown(node['multipleOf'])}, {error}") from error

    def _resolved(self, reference: str) -> object:
        """Return what a local reference points to; None where there is nothing."""
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


def _children(node: _Node, path: str) -> Iterator[tuple[object, str]]:
    for keyword in _SUBSCHEMAS:
        yield node.get(keyword), f"{path}/{keyword}"
    for keyword in _LISTS:
        if isinstance(parts := node.get(keyword), list):
            yield from ((part, f"{path}/{keyword}/{number}") for number, part in enumerate(parts))
    for keyword in _MAPS:
        if isinstance(named := node.get(keyword), dict):
            yield from ((part, f"{path}/{keyword}/{_escaped(name)}") for name, part in named.items())


def _check_values(node: _Node, path: str) -> None:
    for keyword in ("const", "enum"):
        for number, where in _numbers(node.get(keyword), f"{path}/{keyword}"):
            if not is_held(number):
                raise BadSchema(
                    f"{where} is {_shown(number)}, which has more digits than a double holds; "
                    "write it as a string, or give a regex"
                )


def _numbers(value: object, path: str) -> Iterator[tuple[int | float, str]]:
    """Yield the numbers in a value, and where each is."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _numbers(part, f"{path}/{_escaped(name)}")
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from _numbers(part, f"{path}/{number}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value, path


def _add_null(node: _Node, path: str) -> None:
    """Replace `nullable`, of OpenAPI 3.0, which adds null to the types that stand beside it."""
    if "nullable" not in node:
        return
    nullable, types = node.pop("nullable"), node.get("type")
    if not isinstance(nullable, bool):
        raise BadSchema(f"{path}/nullable is {_shown(nullable)}, it must be true or false")
    if nullable:
        if not isinstance(types, str | list):
            raise BadSchema(f"{path}/nullable: it adds null to the type beside it, and there is none")
        listed = [types] if isinstance(types, str) else types
        node["type"] = listed if "null" in listed else [*listed, "null"]


def _move_bounds(node: _Node, path: str) -> None:
    """Move bounds that a double does not hold inwards, to the next number that it does."""
    for keywords, upwards in ((_LOWER, True), (_UPPER, False)):
        for keyword in keywords:
            bound = node.get(keyword)
            if isinstance(bound, bool) or not isinstance(bound, int | float):
                continue
            try:
                node[keyword] = inward(bound, upwards=upwards, exclusive=keyword.startswith("exclusive"))
            except NotHeld as error:
                raise BadSchema(f"{path}/{keyword} is {_shown(bound)}, {error}") from error
    least, most = _tightest(node, _LOWER, max), _tightest(node, _UPPER, min)
    if least > most:
        raise BadSchema(f"{path}: between its bounds is no number that a double holds")


def _include(node: _Node, path: str, keywords: tuple[str, str], opposites: list[float]) -> None:
    """Replace an excluded bound that llguidance would admit by one inside it, which is included."""
    (included, excluded), upwards = keywords, keywords is _LOWER
    for bound in _bounds([node], (excluded,)):
        near = [one for one in opposites if admitted_excluded_bound(bound, one, upwards=upwards)]
        if not near:
            continue
        try:
            moved = just_inside(bound, min(near, key=lambda one: abs(one - bound)))
        except NotHeld as error:
            raise BadSchema(f"{path}/{excluded} is {_shown(bound)}, {error}") from error
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
            raise BadSchema(f"{path}/{keyword} is {_shown(count)}, it must be a whole number that is not negative")
        if count < _MOST_COUNTED:
            node[keyword] = int(count)
        elif keyword.startswith("max"):
            del node[keyword]  # no output is that long
        else:
            raise BadSchema(f"{path}/{keyword} is {_shown(count)}, no output is that long")


def _escaped(name: str) -> str:
    return name[:_LONGEST_VALUE].replace("~", "~0").replace("/", "~1")


def _shown(value: object) -> str:
    text = value.text if isinstance(value, Written) else json.dumps(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."
