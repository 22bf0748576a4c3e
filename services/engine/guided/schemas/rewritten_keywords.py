"""Keywords that llguidance lacks, or does not bound, written in others: unique items, names of keys, formats, `oneOf`.

llguidance's times have fractions of any length, its durations numbers of any length, its mailboxes and hosts labels of
any length, and each of its years a 29 February. The patterns here admit a part of what RFC 3339 (dates, times,
durations), RFC 1123 (hosts, 8 labels of 30 characters) and RFC 5321 (mailboxes) do: no leap seconds, no lower-case `t`
and `z`, no quoted mailboxes. Lengths are bounded by repetition, because patterns intersect slowly.
"""

import json
from collections.abc import Iterator
from copy import deepcopy
from itertools import combinations, permutations
from math import perm
from typing import Any

from services.engine.guided.schemas.schema_nodes import (
    ANNOTATIONS,
    TYPES,
    InvalidSchema,
    SchemaNode,
    UnsupportedSchema,
    children,
    items_of,
    listing,
    mapping,
    target_of,
    type_of,
    types_of,
)

_MAX_ARRAYS = 2000
_MAX_REFERENCES = 16
_VALUES: dict[str, list[Any]] = {"boolean": [False, True], "null": [None]}
_OF_ARRAYS = ("uniqueItems", "items", "prefixItems", "additionalItems", "minItems", "maxItems")

_DIGITS = "[0-9]{1,9}"  # nanoseconds, and numbers of a duration
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = rf"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.{_DIGITS})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_YEARS = f"{_DIGITS}Y(?:{_DIGITS}M(?:{_DIGITS}D)?)?|{_DIGITS}M(?:{_DIGITS}D)?|{_DIGITS}D"
_HOURS = f"T(?:{_DIGITS}H(?:{_DIGITS}M(?:{_DIGITS}S)?)?|{_DIGITS}M(?:{_DIGITS}S)?|{_DIGITS}S)"
_LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,28}[a-zA-Z0-9])?"
_ATOM = r"[a-zA-Z0-9!#$%&'*+\-/=?^_`{|}~]"
_LOCAL = rf"(?:{_ATOM}{{1,64}}|{_ATOM}{{1,31}}\.{_ATOM}{{1,32}}|{_ATOM}{{1,20}}(?:\.{_ATOM}{{1,20}}){{2}})"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:(?:{_YEARS})(?:{_HOURS})?|{_HOURS}|{_DIGITS}W)",
    "hostname": rf"{_LABEL}(?:\.{_LABEL}){{0,7}}",
    "email": rf"{_LOCAL}@{_LABEL}(?:\.{_LABEL}){{0,5}}",
}


def bound_format(node: SchemaNode) -> None:
    """Replace the format of a schema's strings by a pattern, if llguidance does not bound it."""
    name = node.get("format")
    if not isinstance(name, str) or name not in _FORMATS:
        return
    del node["format"]
    pattern = f"^{_FORMATS[name]}$"
    if "pattern" in node:
        node["allOf"] = [*listing(node, "allOf"), {"pattern": pattern}]
    else:
        node["pattern"] = pattern


def list_unique_items(root: SchemaNode, node: SchemaNode, path: str) -> None:
    """Replace `uniqueItems` by the arrays themselves. Raises InvalidSchema if they are too many or unknown."""
    if node.get("uniqueItems") is not True:
        return
    if node.get("maxItems", 2) < 2 or "array" not in types_of(node):
        del node["uniqueItems"]
        return
    first, others = items_of(node)
    values = None if first else values_of(root, others)
    if values is None:
        raise UnsupportedSchema(f"{path}/uniqueItems is supported only where items lists its values by enum or const")
    sizes = range(node.get("minItems", 0), min(len(values), node.get("maxItems", len(values))) + 1)
    if (count := sum(perm(len(values), size) for size in sizes)) > _MAX_ARRAYS:
        raise UnsupportedSchema(f"{path}/uniqueItems admits {count} arrays; it is supported up to {_MAX_ARRAYS}")
    if not sizes:
        raise InvalidSchema(f"{path}/minItems is {node['minItems']}, but only {len(values)} items differ")
    _admit(node, [list(array) for size in sizes for array in permutations(values, size)])


def _admit(node: SchemaNode, arrays: list[list[Any]]) -> None:
    """Replace the keywords of a schema that concern arrays by a list of arrays."""
    for keyword in _OF_ARRAYS:
        node.pop(keyword, None)
    if node.get("type") == "array" and "enum" not in node:
        node["enum"] = arrays
    else:
        others = [name for name in TYPES if name != "array"]
        node["allOf"] = [*listing(node, "allOf"), {"anyOf": [{"enum": arrays}, {"type": others}]}]


def name_keys(root: SchemaNode, node: SchemaNode, path: str) -> None:
    """Replace `propertyNames` by the properties that it lists; one that admits every string says nothing."""
    names = node.get("propertyNames", True)
    if names is True or _admits_every_string(names):
        node.pop("propertyNames", None)
        return
    listed = values_of(root, names)
    if listed is None or "patternProperties" in node:
        raise UnsupportedSchema(f"{path}/propertyNames: propertyNames is not supported, unless it lists names by enum")
    properties, others = mapping(node, "properties"), node.get("additionalProperties", True)
    allowed = [name for name in listed if isinstance(name, str)]
    excluded = {name: False for name in properties if name not in allowed}
    del node["propertyNames"]
    node["properties"] = {**properties, **{name: others for name in allowed if name not in properties}, **excluded}
    node["additionalProperties"] = False


def _admits_every_string(names: object) -> bool:
    return (
        isinstance(names, dict) and names.keys() <= {"type", *ANNOTATIONS} and names.get("type", "string") == "string"
    )


def values_of(root: SchemaNode, schema: object) -> list[Any] | None:
    """Return the different values that a schema lists by enum, const, null or boolean; None if it has others."""
    for _ in range(_MAX_REFERENCES):
        if isinstance(schema, dict) and schema.keys() - ANNOTATIONS == {"$ref"}:
            schema = target_of(root, schema["$ref"])
    if not isinstance(schema, dict) or not schema.keys() <= {"type", "enum", "const", *ANNOTATIONS}:
        return None
    lists = "enum" in schema or "const" in schema or types_of(schema) <= _VALUES.keys()
    return list(_distinct(schema)) if lists else None


def _distinct(schema: SchemaNode) -> Iterator[Any]:
    """Yield the values that `enum`, `const` and `type` all admit, each once."""
    values = listing(schema, "enum") if "enum" in schema else [schema["const"]] if "const" in schema else None
    if values is None:
        values = [value for kind in sorted(types_of(schema)) for value in _VALUES.get(kind, ())]
    seen = set[object]()
    for value in values:
        same = _identity(value)
        if _has_type(value, schema) and same not in seen and same == _identity(schema.get("const", value)):
            seen.add(same)
            yield value


def _has_type(value: Any, schema: SchemaNode) -> bool:
    named: str | list[str] = schema.get("type", list(TYPES))
    whole = type_of(value) != "number" or value % 1 == 0 or "number" in ([named] if isinstance(named, str) else named)
    return type_of(value) in types_of(schema) and whole


def _identity(value: Any) -> object:
    """Return what two values that JSON Schema takes for equal have in common: 1 is 1.0, but not true."""
    if isinstance(value, dict):
        return frozenset((name, _identity(part)) for name, part in value.items())
    if isinstance(value, list):
        return tuple(map(_identity, value))
    return type_of(value), value


def with_exclusive_cases(root: SchemaNode) -> SchemaNode:
    """Return a schema in which each `oneOf` whose cases exclude each other is an `anyOf`.

    llguidance sees that they do only where types and constants stand in the cases, not behind a reference.
    """
    copy: SchemaNode = deepcopy(root)
    waiting, seen = [copy], set[int]()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        waiting += [part for part, _ in children(node, "") if isinstance(part, dict)]
        cases = listing(node, "oneOf")
        if len(cases) > 1 and "anyOf" not in node and _exclude_each_other(copy, cases):
            items = [("anyOf" if keyword == "oneOf" else keyword, value) for keyword, value in node.items()]
            node.clear()
            node.update(items)
    return copy


def _exclude_each_other(root: SchemaNode, cases: list[Any]) -> bool:
    facts = [(_types(parts), _constants(root, parts)) for case in cases if (parts := _with_references(root, case))]
    return len(facts) == sum(case is not False for case in cases) and all(
        _differ(*one, *other) for one, other in combinations(facts, 2)
    )


def _differ(
    types: frozenset[str], constants: dict[str, set[str]], other_types: frozenset[str], others: dict[str, set[str]]
) -> bool:
    common = types & other_types
    if common <= {"object"} and any(not constants[key] & others[key] for key in constants.keys() & others.keys()):
        return True
    return not common


def _with_references(root: SchemaNode, schema: object) -> list[SchemaNode]:
    """Return a schema and those that it refers to; empty for one that is none."""
    found: list[SchemaNode] = []
    while isinstance(schema, dict) and len(found) < _MAX_REFERENCES:
        found.append(schema)
        schema = target_of(root, schema.get("$ref"))
    return found


def _types(parts: list[SchemaNode]) -> frozenset[str]:
    types = frozenset.intersection(*map(types_of, parts))
    for part in parts:
        if (values := _listed(part)) is not None:
            types &= {type_of(value) for value in values}
    return types


def _constants(root: SchemaNode, parts: list[SchemaNode]) -> dict[str, set[str]]:
    """Return the listed values, as JSON, of required keys."""
    found: dict[str, set[str]] = {}
    required = {name for part in parts for name in listing(part, "required") if isinstance(name, str)}
    for name in required:
        schemas = [one for part in parts for one in _with_references(root, mapping(part, "properties").get(name))]
        for values in filter(None, map(_listed, schemas)):
            found[name] = {json.dumps(_plain(value), sort_keys=True) for value in values}
    return found


def _listed(schema: SchemaNode) -> list[Any] | None:
    return [schema["const"]] if "const" in schema else listing(schema, "enum") or None


def _plain(value: Any) -> Any:
    """Return a number as the one that equals it in JSON: 1.0 is 1."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
