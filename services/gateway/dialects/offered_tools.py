"""The tools that a request offers, and the types of their arguments."""

import ast
import json
from collections.abc import Iterator, Mapping
from typing import Any

_TYPES: dict[type, str] = {
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
}
_UNIONS = ("anyOf", "oneOf", "allOf")


class OfferedTools:
    """The names of tools, and the JSON schemas of their arguments."""

    def __init__(self, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._schemas = schemas
        self.names = frozenset(schemas)

    def requires_arguments(self, name: str) -> bool:
        """Return whether a tool cannot be called with an empty object."""
        schema = self._schemas[name]
        return bool(schema.get("required") or schema.get("minProperties"))

    def types(self, name: str, key: str) -> frozenset[str]:
        """Return the JSON types that an argument may have, none if its schema leaves them open."""
        schema = self._schemas[name]
        properties = schema.get("properties")
        own = properties.get(key) if isinstance(properties, dict) else None
        return frozenset(_types(own, schema, set())) if isinstance(own, dict) else frozenset()


def json_of(text: str, types: frozenset[str]) -> str:
    """Return an argument that a model wrote without quotes as JSON text.

    It is the value that the text has in JSON or Python, if the types allow it or are open, else a string.
    """
    if types == {"string"}:
        return _dumped(text)
    if "number" in types:
        types |= {"integer"}
    known, value = _value(text)
    if known and (not types or _type(value) in types or "string" not in types):
        return _dumped(value)
    return _dumped(text)


def _types(schema: Mapping[str, Any], root: Mapping[str, Any], seen: set[int]) -> Iterator[str]:
    """Yield the types that a schema names. `seen` are the schemas that were visited: they may refer to each other."""
    if id(schema) in seen:
        return
    seen.add(id(schema))
    given = schema.get("type")
    yield from (one for one in (given if isinstance(given, list) else [given]) if isinstance(one, str))
    listed = schema.get("enum")
    yield from map(_type, listed if isinstance(listed, list) else ())
    if "const" in schema:
        yield _type(schema["const"])
    if schema.get("nullable") is True:
        yield "null"
    for part in _parts(schema, root):
        yield from _types(part, root, seen)


def _parts(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for union in _UNIONS:
        parts = schema.get(union)
        yield from (part for part in (parts if isinstance(parts, list) else ()) if isinstance(part, dict))
    target: Any = root
    if isinstance(reference := schema.get("$ref"), str) and reference.startswith("#/"):
        for step in reference[2:].split("/"):
            target = target.get(step) if isinstance(target, Mapping) else None
        if isinstance(target, dict):
            yield target


def _type(value: Any) -> str:
    return _TYPES.get(type(value), "null")


def _value(text: str) -> tuple[bool, Any]:
    """Return whether a text is a value in JSON or Python, and which."""
    for read in (json.loads, ast.literal_eval):
        try:
            value = read(text.strip())
            json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        return True, value
    return False, None


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
