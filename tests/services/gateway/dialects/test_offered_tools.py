"""Arguments without quotes have the types of the tool's schema."""

from typing import Any

import pytest

from services.gateway.dialects.offered_tools import OfferedTools, json_of

SCHEMA: dict[str, Any] = {
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "either": {"type": ["string", "integer"]},
        "choice": {"enum": ["1", 2]},
        "reference": {"$ref": "#/$defs/flag"},
        "union": {"anyOf": [{"type": "object"}, {"oneOf": [{"type": "null"}]}]},
        "old": {"type": "number", "nullable": True},
        "open": {},
        "endless": {"$ref": "#/properties/endless"},
        "broken": 7,
    },
    "$defs": {"flag": {"type": "boolean"}},
    "required": ["text"],
}
TOOLS = OfferedTools({"f": SCHEMA, "g": {}})


@pytest.mark.parametrize(
    ("key", "types"),
    [
        ("text", {"string"}),
        ("either", {"string", "integer"}),
        ("choice", {"string", "integer"}),
        ("reference", {"boolean"}),
        ("union", {"object", "null"}),
        ("old", {"number", "null"}),
        *((key, set[str]()) for key in ("open", "endless", "broken", "absent")),
    ],
)
def test_the_types_of_an_argument_are_those_of_its_schema(key: str, types: set[str]) -> None:
    assert TOOLS.types("f", key) == types
    assert TOOLS.types("g", key) == set()


def test_schemas_that_refer_to_each_other_are_visited_once() -> None:
    part = {"$ref": "#/properties/a"}
    tools = OfferedTools({"f": {"properties": {"a": {"anyOf": [part] * 10 + [{"type": "null"}]}}}})
    assert tools.types("f", "a") == {"null"}


@pytest.mark.parametrize(
    "schema", [{"enum": 5}, {"enum": None}, {"type": [{}]}, {"type": 3}, {"anyOf": 1}, {"$ref": 7}]
)
def test_a_schema_of_any_shape_leaves_the_types_open(schema: dict[str, Any]) -> None:
    assert OfferedTools({"f": {"properties": {"a": schema}}}).types("f", "a") == frozenset()


def test_a_tool_with_required_arguments_needs_some() -> None:
    assert TOOLS.requires_arguments("f")
    assert not TOOLS.requires_arguments("g")


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        ("3", {"string"}, '"3"'),
        ("3", {"integer"}, "3"),
        ("3", {"string", "null"}, '"3"'),
        ("null", {"string", "null"}, "null"),
        ("True", {"boolean"}, "true"),
        ("None", {"null", "integer"}, "null"),
        ("{'a': [1, None]}", {"object"}, '{"a": [1, null]}'),
        ("words", {"integer"}, '"words"'),
        ("3", {"boolean"}, "3"),
        ("3", set(), "3"),
        ("words", set(), '"words"'),
        ("1e999", {"number"}, '"1e999"'),
        ("NaN", {"number"}, '"NaN"'),
        ('"a"', {"object"}, '"a"'),
        ("", {"integer"}, '""'),
    ],
)
def test_a_value_is_what_its_text_means_if_its_types_allow_that(text: str, types: set[str], expected: str) -> None:
    assert json_of(text, frozenset(types)) == expected
