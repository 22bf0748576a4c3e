"""The schemas that calls are enforced by."""

import json
from typing import Any

import pytest

from quire.v1 import gateway_pb2
from services.gateway.text.tool_choice import arguments_schema, call_grammar

DIGIT = {"type": "object", "properties": {"a": {"type": "integer"}}}
CLOSED = {"additionalProperties": False, **DIGIT}


def closed(schema: Any) -> Any:
    return json.loads(arguments_schema(gateway_pb2.Tool(name="x", parameters=json.dumps(schema))))


@pytest.mark.parametrize(
    ("schema", "enforced"),
    [
        (DIGIT, CLOSED),
        (DIGIT | {"additionalProperties": True}, DIGIT | {"additionalProperties": True}),
        ({"type": "object"}, {"type": "object"}),
        ({"$defs": {"d": DIGIT}, "anyOf": [True]}, {"$defs": {"d": CLOSED}, "anyOf": [True]}),
        ({"allOf": [DIGIT]}, {"allOf": [CLOSED]}),
        ({"allOf": [DIGIT, {"type": "object"}]}, {"allOf": [DIGIT, {"type": "object"}]}),
        (DIGIT | {"patternProperties": {}}, DIGIT | {"patternProperties": {}}),
        ({"items": DIGIT | {"anyOf": []}}, {"items": DIGIT | {"anyOf": []}}),
        ({"const": DIGIT}, {"const": DIGIT}),
    ],
)  # fmt: skip
def test_objects_get_no_properties_that_their_schema_does_not_name(schema: Any, enforced: Any) -> None:
    assert closed(schema) == enforced


def test_a_tool_without_schema_has_no_arguments() -> None:
    grammar = call_grammar([gateway_pb2.Tool(name="now")], parallel=False)
    assert grammar.max_calls == 1
    assert json.loads(grammar.tools[0].parameters) == {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
    }
    assert call_grammar([gateway_pb2.Tool(name="now")], parallel=True).max_calls > 1
