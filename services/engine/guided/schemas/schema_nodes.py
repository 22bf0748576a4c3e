"""Parts of JSON schemas: where subschemas are, JSON pointers, and what a schema says of types and items."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote

SchemaNode = dict[str, Any]

SUBSCHEMAS = ("additionalProperties", "additionalItems", "items")  # one schema
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")  # a list of them
MAPS = ("properties", "patternProperties", "$defs", "definitions")  # named ones
TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "example", "$comment", "deprecated", "readOnly", "writeOnly"}
    | {"contentEncoding", "contentMediaType", "contentSchema", "discriminator", "externalDocs", "xml"}
)
_MAX_VALUE_LENGTH = 60


class DecimalLiteral(float):
    """A number with a fraction or an exponent, and its text."""

    text: str

    def __new__(cls, text: str) -> "DecimalLiteral":
        """Read a JSON number."""
        made = super().__new__(cls, text)
        made.text = text
        return made


class InvalidSchema(ValueError):
    """The schema is refused; the message names the place as a JSON pointer."""


class UnsupportedSchema(InvalidSchema):
    """The schema is refused, or a case of it left out, although it may be right."""


class Case(NamedTuple):
    """One case of an `anyOf` or `oneOf`: the list of all cases, its place there, and its path."""

    cases: list[Any]
    at: int
    path: str


def case_of(node: SchemaNode, path: str, where: str) -> Case | None:
    """Return the case of a schema that a path of one of its `children` leads to, if it is one."""
    keyword, _, at = where.removeprefix(f"{path}/").partition("/")
    if keyword not in ("anyOf", "oneOf") or not where.startswith(path) or not at.isdecimal():
        return None
    return Case(node[keyword], int(at), where)


def children(node: SchemaNode, path: str) -> Iterator[tuple[object, str]]:
    """Yield the schemas in a schema, with their paths; None for a keyword that is missing."""
    for keyword in SUBSCHEMAS:
        yield node.get(keyword), f"{path}/{keyword}"
    for keyword in LISTS:
        yield from ((part, f"{path}/{keyword}/{at}") for at, part in enumerate(listing(node, keyword)))
    for keyword in MAPS:
        yield from ((part, f"{path}/{keyword}/{pointer_part(name)}") for name, part in mapping(node, keyword).items())


def reference_names(reference: object) -> list[str]:
    """Return the names on the way to the target of a reference; empty if it is not a pointer into the schema."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return []
    return [unquote(part).replace("~1", "/").replace("~0", "~") for part in reference[2:].split("/")]


def steps(root: SchemaNode, reference: object) -> Iterator[tuple[object, str, object]]:
    """Yield each part that a reference leads through, with the name of the next part, and that one, None at an end."""
    place: object = root
    for name in reference_names(reference):
        before = place
        if isinstance(before, dict):
            place = before.get(name)
        else:
            within = isinstance(before, list) and name.isdecimal() and int(name) < len(before)
            place = before[int(name)] if isinstance(before, list) and within else None
        yield before, name, place


def target_of(root: SchemaNode, reference: object) -> object:
    """Return the target of a reference within a schema; None if there is none, or if it has a name of its own."""
    ways = [place for _, _, place in steps(root, reference)]
    return root if reference in ("", "#") else ways[-1] if ways else None


def mapping(node: SchemaNode, keyword: str) -> dict[str, Any]:
    """Return a keyword's object; empty if it is missing or something else, which llguidance refuses."""
    value = node.get(keyword)
    return value if isinstance(value, dict) else {}


def listing(node: SchemaNode, keyword: str) -> list[Any]:
    """Return a keyword's array; empty if it is missing or something else, which llguidance refuses."""
    value = node.get(keyword)
    return value if isinstance(value, list) else []


def types_of(node: SchemaNode) -> frozenset[str]:
    """Return the types that a schema's own `type` admits; integers count as numbers."""
    named = node.get("type", list(TYPES))
    return frozenset("number" if one == "integer" else one for one in ([named] if isinstance(named, str) else named))


def type_of(value: object) -> str:
    """Return the type of a JSON value; integers are numbers."""
    for kind, name in ((bool, "boolean"), (str, "string"), (int | float, "number"), (list, "array"), (dict, "object")):
        if isinstance(value, kind):
            return name
    return "null"


def items_of(node: SchemaNode) -> tuple[list[Any], Any]:
    """Return the schemas of an array's first items, and the schema of all others, under the names of any draft."""
    if isinstance(first := node.get("items"), list):
        return first, node.get("additionalItems", True)
    return listing(node, "prefixItems"), node.get("items", True)


def pointer_part(name: str) -> str:
    """Return a name as it is written in a JSON pointer, shortened."""
    return name[:_MAX_VALUE_LENGTH].replace("~", "~0").replace("/", "~1")


def shown(value: object) -> str:
    """Return a value as it is written in a message, shortened."""
    text = value.text if isinstance(value, DecimalLiteral) else json.dumps(value)
    return text if len(text) <= _MAX_VALUE_LENGTH else f"{text[:_MAX_VALUE_LENGTH]}..."
