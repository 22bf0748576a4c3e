"""The schemas that calls are enforced by."""

import json
from typing import Any

import pytest

from quire.v1 import gateway_pb2
from services.gateway.dialects.declarations import CALL_FORMATS, DEFAULT_CALLS, HARMONY
from services.gateway.dialects.dialect import CallFormat
from services.gateway.dialects.forms.call_form import WrittenCall
from services.gateway.text.tool_choice import arguments_schema, call_grammar, check_arguments_schema, in_text
from services.runtime.errors import InvalidField

DIGIT = {"type": "object", "properties": {"a": {"type": "integer"}}}
OBJECT = {"type": "object"}
CLOSED = {"additionalProperties": False, **DIGIT}


def closed(schema: Any) -> Any:
    return json.loads(arguments_schema(gateway_pb2.Tool(name="x", parameters=json.dumps(schema))))


@pytest.mark.parametrize(
    ("schema", "enforced"),
    [
        (DIGIT, CLOSED),
        (DIGIT | {"additionalProperties": True}, DIGIT | {"additionalProperties": True}),
        (OBJECT, OBJECT),
        (OBJECT | {"$defs": {"d": DIGIT}, "anyOf": [True]}, OBJECT | {"$defs": {"d": CLOSED}, "anyOf": [True]}),
        (OBJECT | {"allOf": [DIGIT]}, OBJECT | {"allOf": [CLOSED]}),
        (OBJECT | {"allOf": [DIGIT, OBJECT]}, OBJECT | {"allOf": [DIGIT, OBJECT]}),
        (DIGIT | {"patternProperties": {}}, DIGIT | {"patternProperties": {}}),
        (OBJECT | {"items": DIGIT | {"anyOf": []}}, OBJECT | {"items": DIGIT | {"anyOf": []}}),
        (OBJECT | {"const": DIGIT}, OBJECT | {"const": DIGIT}),
    ],
)  # fmt: skip
def test_objects_get_no_properties_that_their_schema_does_not_name(schema: Any, enforced: Any) -> None:
    assert closed(schema) == enforced


@pytest.mark.parametrize("schema", [{}, {"$ref": "#/$defs/d"}, {"type": "object", "nullable": True}])
def test_arguments_are_an_object_if_their_schema_leaves_it_open(schema: Any) -> None:
    assert closed(schema) == OBJECT | {key: value for key, value in schema.items() if key != "nullable"}


@pytest.mark.parametrize("schema", [{"type": "string"}, {"type": ["object", "null"]}, {"type": None}, True, 5])
def test_a_schema_of_something_else_than_an_object_is_refused(schema: Any) -> None:
    with pytest.raises(InvalidField, match="x must be a JSON schema of type 'object', not") as refused:
        check_arguments_schema(schema, "x")
    assert refused.value.field == "x"


def test_a_tool_without_schema_has_no_arguments() -> None:
    grammar = call_grammar([gateway_pb2.Tool(name="now")], DEFAULT_CALLS, parallel=False)
    assert grammar.max_calls == 1
    assert json.loads(grammar.tools[0].parameters) == {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
    }
    several = call_grammar([gateway_pb2.Tool(name="now")], DEFAULT_CALLS, parallel=True)
    assert several.max_calls > 1


@pytest.mark.parametrize("calls", [*CALL_FORMATS, HARMONY.calls], ids=lambda calls: calls.name)
def test_the_texts_of_a_grammar_are_those_that_the_form_writes(calls: CallFormat) -> None:
    tools = [gateway_pb2.Tool(name="now"), gateway_pb2.Tool(name="look_up")]
    grammar = call_grammar(tools, calls, parallel=True)
    number = f"7{grammar.after_number}" if grammar.after_number else ""
    arguments = "" if grammar.HasField("argument_texts") else "{}"
    each = [f"{tool.begin}{number}{arguments}{tool.end}" for tool in grammar.tools]
    text = f"{grammar.section_begin}{grammar.separator.join(each)}{grammar.section_end}"
    ids = ("functions.now:7", "functions.look_up:7") if number else ("", "")
    names = ("now", "look_up")
    written = [calls.form.written(WrittenCall(name, "{}", own)) for name, own in zip(names, ids, strict=True)]
    assert text == calls.section(written)


@pytest.mark.parametrize("calls", CALL_FORMATS, ids=lambda calls: calls.name)
def test_calls_in_text_begin_with_a_mark_in_front_of_their_name(calls: CallFormat) -> None:
    tools = [gateway_pb2.Tool(name="now"), gateway_pb2.Tool(name="look_up")]
    grammar = in_text(call_grammar(tools, calls, parallel=True), calls, {"now"})
    assert grammar
    assert grammar.mark
    assert grammar.mark_only_at_start == (not calls.opening)
    assert all(
        f"{grammar.section_begin}{tool.begin.partition(tool.name)[0]}".startswith(grammar.mark)
        for tool in grammar.tools
    )


def test_a_grammar_that_is_too_large_is_none_in_text() -> None:
    tools = [gateway_pb2.Tool(name="now", parameters=json.dumps({"type": "object", "description": "x" * 66_000}))]
    assert in_text(call_grammar(tools, DEFAULT_CALLS, parallel=True), DEFAULT_CALLS, set()) is None
