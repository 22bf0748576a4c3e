"""The strings that a schema admits, and the schema of all other values.

Arguments of some models are strings without quotes. What JSON Schema says of strings then applies to the text itself.
"""

import re
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple

from services.engine.guided.schemas.schema_nodes import (
    TYPES,
    SchemaNode,
    UnsupportedSchema,
    listing,
    pointer_part,
    target_of,
)

FREE = "\ue000"
"""Stands in a pattern for any text, which a grammar may have to bound."""

_MAX_SETS = 64
_OF_STRINGS = ("pattern", "minLength", "maxLength", "format")
_COMBINING = ("anyOf", "oneOf", "allOf", "$ref", "enum", "const")
_OTHER_TYPES = [name for name in TYPES if name != "string"]
_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_ASCII_CLASSES = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]"}
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_GROUP = "[0-9a-fA-F]{1,4}"
# RFC 4122, RFC 2673, the full form of RFC 4291, and what RFC 3986 has in the order of its parts.
_FORMATS = {
    "uuid": "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"(?:{_BYTE}\.){{3}}{_BYTE}",
    "ipv6": f"(?:{_GROUP}:){{7}}{_GROUP}",
    "uri": r"[a-z][a-z0-9+.-]{1,15}://[A-Za-z0-9._~-]{1,253}(?::[0-9]{1,5})?(?:/[A-Za-z0-9._~!$&'()*+,;=:@-]{0,200}){0,16}"
    r"(?:\?[A-Za-z0-9._~!$&'()*+,;=:@/?-]{0,500})?(?:#[A-Za-z0-9._~!$&'()*+,;=:@/?-]{0,200})?",
    "unknown": FREE,
}


def with_ascii_classes(pattern: str) -> str:
    r"""Return a pattern whose \d and \w are ASCII, as in the patterns of JSON schemas; \s is Unicode's in both."""
    return _ESCAPE.sub(lambda escape: _ASCII_CLASSES.get(escape[0], escape[0]), pattern)


def regex(pattern: str) -> str:
    """Return a regular expression as llguidance's grammars have it."""
    return f"/{_ESCAPE.sub(lambda escape: escape[0].replace('/', '[/]'), pattern).replace('/', chr(92) + '/')}/"


class StringSet(NamedTuple):
    """Strings that one case of a schema admits: all that everything here admits. `literals` is None for no list."""

    literals: tuple[str, ...] | None = None
    least: int = 0
    most: int | None = None
    patterns: tuple[str, ...] = ()  # regular expressions of whole strings, with FREE where anything may stand

    def both(self, other: "StringSet") -> "StringSet":
        """Return the strings that are in both sets."""
        lists = [one.literals for one in (self, other) if one.literals is not None]
        literals = tuple(one for one in lists[0] if all(one in more for more in lists[1:])) if lists else None
        most = min((one.most for one in (self, other) if one.most is not None), default=None)
        patterns = tuple(dict.fromkeys((*self.patterns, *other.patterns)))
        return StringSet(literals, max(self.least, other.least), most, patterns)

    @property
    def is_empty(self) -> bool:
        """Whether lists and lengths leave no string."""
        fits = [one for one in self.literals or () if self.has_length(len(one))]
        return (self.most is not None and self.least > self.most) or (self.literals is not None and not fits)

    def has_length(self, length: int) -> bool:
        """Return whether strings may have this length."""
        return self.least <= length and (self.most is None or length <= self.most)


def strings_of(root: SchemaNode, schema: Any, path: str) -> list[StringSet]:
    """Return the strings that a part of a schema admits, as sets of which one must have a string.

    llguidance must have compiled the schema before, which checks it. Raises UnsupportedSchema.
    """
    return _Strings(root).of(schema, path, frozenset())


class _Strings:
    def __init__(self, root: SchemaNode) -> None:
        self._root = root

    def of(self, schema: Any, path: str, seen: frozenset[int]) -> list[StringSet]:
        """Return the sets of strings. `seen` are the schemas around this one."""
        if schema is True:
            return [StringSet()]
        if schema is False or id(schema) in seen or "string" not in _named_types(schema):
            return []
        sets = [_own_set(schema, path)]
        for part in self._parts(schema, path, seen | {id(schema)}):
            sets = [one.both(other) for one in sets for other in part]
            if len(sets) > _MAX_SETS:
                raise UnsupportedSchema(f"{path}: its strings have more than {_MAX_SETS} cases")
        return [one for one in sets if not one.is_empty]

    def _parts(self, schema: SchemaNode, path: str, seen: frozenset[int]) -> Iterator[list[StringSet]]:
        """Yield the sets of parts that all must have a string."""
        if "$ref" in schema:
            yield self.of(target_of(self._root, schema["$ref"]), schema["$ref"], seen)
        for at, part in enumerate(listing(schema, "allOf")):
            yield self.of(part, f"{path}/allOf/{at}", seen)
        for keyword in ("anyOf", "oneOf"):  # llguidance has found that the cases of a oneOf do not overlap
            if keyword in schema:
                cases = enumerate(listing(schema, keyword))
                yield [one for at, part in cases for one in self.of(part, f"{path}/{keyword}/{at}", seen)]


def _own_set(schema: SchemaNode, path: str) -> StringSet:
    found = StringSet(None, schema.get("minLength", 0), schema.get("maxLength"))
    for keyword in ("enum", "const"):
        if keyword in schema:
            values = schema[keyword] if keyword == "enum" else [schema[keyword]]
            found = found.both(StringSet(tuple(one for one in values if isinstance(one, str))))
    patterns = []
    if "pattern" in schema:
        patterns.append(_whole(with_ascii_classes(schema["pattern"])))
    if "format" in schema:
        if schema["format"] not in _FORMATS:
            raise UnsupportedSchema(f"{path}/format: {pointer_part(str(schema['format']))} is not supported")
        patterns.append(_FORMATS[schema["format"]])
    return found._replace(patterns=tuple(patterns))


def _whole(pattern: str) -> str:
    """Return the pattern of whole texts in which a pattern is found. Anchors stand at ends of its alternatives."""
    cases, depth = [list[str]()], 0
    for part in _PARTS.findall(pattern):
        depth += {"(": 1, ")": -1}.get(part, 0)
        if part == "|" and not depth:
            cases.append([])
        else:
            cases[-1].append(part)
    return "|".join(map(_whole_case, cases))


def _whole_case(parts: list[str]) -> str:
    case = "".join(parts)
    if _is_one_group(parts):
        return f"(?:{_whole(case.removeprefix('(').removeprefix('?:')[:-1])})"
    before = "" if case.startswith("^") else FREE
    ends = case.endswith("$") and (len(case) - len(case[:-1].rstrip("\\"))) % 2 == 1
    return f"{before}(?:{case.removeprefix('^')[: -1 if ends else None]}){'' if ends else FREE}"


def _is_one_group(parts: list[str]) -> bool:
    """Return whether an alternative is one group without a name or flags."""
    if parts[:1] != ["("] or (parts[1:2] == ["?"] and parts[2:3] != [":"]):
        return False
    depths = list(accumulate({"(": 1, ")": -1}.get(part, 0) for part in parts))
    return 0 not in depths[:-1]


def without_strings(root: SchemaNode, schema: Any) -> Any:
    """Return the schema of all values that are no strings; False if there are none."""
    return _others(root, schema, frozenset())


def _others(root: SchemaNode, schema: Any, seen: frozenset[int]) -> Any:
    if schema is False or id(schema) in seen:
        return False
    if schema is True:
        return {"type": _OTHER_TYPES}
    left = {keyword: value for keyword, value in schema.items() if keyword not in _OF_STRINGS}
    if "type" in schema or not any(keyword in schema for keyword in _COMBINING):
        left["type"] = [name for name in _named_types(schema) if name != "string"]
    if "enum" in schema:
        left["enum"] = [value for value in schema["enum"] if not isinstance(value, str)]
    if "$ref" in left:
        left["allOf"] = [*listing(schema, "allOf"), target_of(root, left.pop("$ref"))]
    seen |= {id(schema)}
    for keyword in ("anyOf", "oneOf"):
        if keyword in left:
            cases = [_others(root, part, seen) for part in listing(left, keyword)]
            left[keyword] = [case for case in cases if case is not False]
    if "allOf" in left:
        left["allOf"] = [_others(root, part, seen) for part in left["allOf"]]
    return False if _is_empty(left) else _unwrapped(left)


def _is_empty(schema: SchemaNode) -> bool:
    lists = (schema.get(keyword) for keyword in ("type", "enum", "anyOf", "oneOf"))
    return [] in lists or False in listing(schema, "allOf") or isinstance(schema.get("const"), str)


def _unwrapped(schema: SchemaNode) -> SchemaNode:
    """Return the only schema of an `allOf` instead of it: llguidance intersects slowly."""
    parts = listing(schema, "allOf")
    only: SchemaNode = parts[0] if len(schema) == 1 and len(parts) == 1 else schema
    return only


def _named_types(schema: SchemaNode) -> list[str]:
    named = schema.get("type", list(TYPES))
    return [named] if isinstance(named, str) else list(named)
