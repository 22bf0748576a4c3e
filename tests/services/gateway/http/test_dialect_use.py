"""The constraint and the parser of calls depend on the format of the model."""

import json
from typing import Any

import pytest

from quire.v1 import gateway_pb2
from services.gateway.dialects.events import Arguments, CallEnd, CallStart, Text
from services.gateway.http.openai.dialect_use import DialectUse
from services.gateway.http.openai.messages import chat
from services.gateway.http.openai.requests import ChatCompletionRequest
from services.gateway.http.openai.translation import chat_call
from services.gateway.text.chat_template import ChatTemplate
from services.gateway.text.tokenizer import Tokenizer
from services.runtime.errors import InvalidField
from tests.services.gateway.text.test_detokenizer import byte_level

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
MARKED = "{{ tools | tojson }}[TOOL_CALLS]" + PLAIN
SUM = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SUM}} for name in ("sum", "add")]
NAMED = {"type": "function", "function": {"name": "add"}}


def use(template: str, special: str = "", **fields: Any) -> tuple[DialectUse, gateway_pb2.GenerateRequest]:
    """Return the use of tools of a chat, and its request after the preparation."""
    body = ChatCompletionRequest.model_validate(
        {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS, **fields}
    )
    request = gateway_pb2.GenerateRequest()
    request.prompt.chat.CopyFrom(chat(body.messages, body.tools or [], body))
    backend = byte_level()
    backend.add_special_tokens([special] if special else [])
    one = DialectUse(body, Tokenizer(backend, ChatTemplate(template, {})))
    one.prepare(request)
    return one, request


@pytest.mark.parametrize(
    ("fields", "names", "max_calls"),
    [
        ({"tool_choice": "required"}, ["sum", "add"], 16),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ["sum", "add"], 1),
        ({"tool_choice": NAMED}, ["add"], 1),
    ],
)
def test_a_model_without_a_format_is_held_to_calls_between_tags(
    fields: dict[str, Any], names: list[str], max_calls: int
) -> None:
    one, request = use(PLAIN, **fields)
    assert [tool.name for tool in request.constraint.tool_calls.tools] == names
    assert request.constraint.tool_calls.max_calls == max_calls
    parser = one.parser(in_thought=False)
    assert parser
    assert parser.push('<tool_call>\n{"name": "add", "arguments": {') == [CallStart("add"), Arguments("{")]


def test_a_model_with_another_form_is_held_to_it() -> None:
    one, request = use(MARKED, "[TOOL_CALLS]", tool_choice=NAMED)
    grammar = request.constraint.tool_calls
    [tool] = grammar.tools
    assert (grammar.section_begin, tool.begin, tool.end) == ("[TOOL_CALLS]", "add[ARGS]", "")
    assert json.loads(tool.parameters) == SUM | {"additionalProperties": False}
    assert request.output.special_tokens
    parser = one.parser(in_thought=False)
    assert parser
    assert parser.push('[TOOL_CALLS]add[ARGS]{"a"') == [CallStart("add"), Arguments('{"a"')]
    one, request = use(MARKED, tool_choice="required")
    assert len(request.constraint.tool_calls.tools) == 2
    assert request.constraint.tool_calls.separator == "[TOOL_CALLS]"


TAGS = "{{ tools }}<tool_call><arg_key></arg_key><arg_value></arg_value></tool_call>" + PLAIN


def test_a_model_whose_arguments_stand_between_tags_is_held_to_them() -> None:
    one, request = use(TAGS, tool_choice=NAMED)
    grammar = request.constraint.tool_calls
    assert (grammar.tools[0].begin, grammar.tools[0].end) == ("<tool_call>add", "</tool_call>")
    assert grammar.argument_texts.before_text == "</arg_key><arg_value>"
    parser = one.parser(in_thought=False)
    assert parser
    call = [CallStart("add"), Arguments("{"), Arguments('"a": '), Arguments("1"), Arguments("}"), CallEnd()]
    assert parser.push("<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>") == call


@pytest.mark.parametrize(
    "parameters",
    [{"minProperties": 1}, {"type": "object"}, {"properties": {"a b": {}}}, {"properties": {}, "allOf": []}],
)
def test_calls_that_cannot_be_written_between_tags_are_replaced_by_json(parameters: dict[str, Any]) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": SUM | parameters}}]
    tools += [{"type": "function", "function": {"name": "sum", "parameters": SUM}}]
    if parameters == {"type": "object"}:
        del tools[0]["function"]["parameters"]["properties"]  # type: ignore[attr-defined]
    one, request = use(TAGS, tool_choice=NAMED, tools=tools)
    schema = json.loads(request.constraint.json_schema)
    assert schema["properties"]["name"] == {"const": "add"}
    parser = one.parser(in_thought=False)
    assert parser
    call = [CallStart("add"), Arguments('{"a": 1}'), CallEnd()]
    assert parser.push('{"name": "add", "arguments": {"a": 1}}') == call


@pytest.mark.parametrize(
    ("choice", "message", "path", "named"),
    [
        ("required", "constraint.json_schema: #/$defs/1/type: x", "tools[1].function.parameters", ": #/type: x"),
        (NAMED, "constraint.json_schema: #/$defs/0/type: x", "tools[1].function.parameters", ": #/type: x"),
        (NAMED, 'constraint.tool_calls: the parameters of "add": x', "tools[1].function.parameters", ": x"),
        (NAMED, "constraint.tool_calls.tools[0].name is y", "tools[1].function.name", " is y"),
        (NAMED, "constraint.tool_calls: all of it", "tools", ": all of it"),
    ],
)
def test_a_fault_in_the_constraint_is_named_by_its_place_in_the_tools(
    choice: Any, message: str, path: str, named: str
) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    body = ChatCompletionRequest.model_validate({"messages": messages, "tools": TOOLS, "tool_choice": choice})
    names = chat_call(body, None).field_names
    field = message.partition(":")[0].partition(" ")[0]
    assert names.named(field, message) == (path, path + named)


def test_a_fault_in_the_format_beside_tools_is_named_as_the_format() -> None:
    messages = [{"role": "user", "content": "Hi"}]
    body = ChatCompletionRequest.model_validate({"messages": messages, "tools": TOOLS, "response_format": FORMAT})
    names = chat_call(body, None).field_names
    message = "constraint.tool_calls: answer: #/not: x"
    assert names.named("constraint.tool_calls", message) == (FORMAT_FIELD, f"{FORMAT_FIELD}: #/not: x")
    message = "constraint.tool_calls: tools[1].parameters: #/not: x"
    named = "tools[1].function.parameters"
    assert names.named("constraint.tool_calls", message) == (named, f"{named}: #/not: x")


def test_a_model_that_decides_keeps_the_token_that_marks_calls() -> None:
    for template, special, kept in ((MARKED, "[TOOL_CALLS]", True), (MARKED, "", False), (PLAIN, "<tool_call>", True)):
        one, request = use(template, special)
        assert not request.HasField("constraint")
        assert request.output.special_tokens == kept
        assert one.parser(in_thought=False)


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": None}, {"tools": []}])
def test_without_tools_the_output_is_text(fields: dict[str, Any]) -> None:
    one, request = use(PLAIN, **fields)
    assert not request.HasField("constraint")
    assert one.parser(in_thought=False) is None


FORMAT_FIELD = "response_format.json_schema.schema"
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "properties": {}}}}


def chat_request(**fields: Any) -> tuple[DialectUse, gateway_pb2.GenerateRequest]:
    """Return the use and the request of a whole body, for a model without a form of its own."""
    body = ChatCompletionRequest.model_validate(
        {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS, **fields}
    )
    [request] = chat_call(body, None).generations
    one = DialectUse(body, Tokenizer(byte_level(), ChatTemplate(PLAIN, {})))
    one.prepare(request)
    return one, request


def test_a_format_beside_tools_is_that_of_an_answer_without_calls() -> None:
    _, request = chat_request(response_format=FORMAT)
    grammar = request.constraint.tool_calls
    assert json.loads(grammar.answer) == FORMAT["json_schema"]["schema"]
    assert [tool.name for tool in grammar.tools] == ["sum", "add"]
    _, request = chat_request(response_format={"type": "json_object"})
    assert json.loads(request.constraint.tool_calls.answer) == {"type": "object"}


def test_a_required_call_beside_a_format_is_a_call() -> None:
    _, request = chat_request(response_format=FORMAT, tool_choice="required")
    assert len(request.constraint.tool_calls.tools) == 2
    assert not request.constraint.tool_calls.answer


def test_without_tools_to_call_the_format_is_that_of_the_output() -> None:
    _, request = chat_request(response_format=FORMAT, tool_choice="none")
    assert request.constraint.WhichOneof("kind") == "json_schema"


def strict_tools(*strict: bool | None, **parameters: Any) -> list[dict[str, Any]]:
    """Return tools named 0, 1 and so on."""
    functions = [
        {"name": str(at), "parameters": SUM | parameters} | ({} if one is None else {"strict": one})
        for at, one in enumerate(strict)
    ]
    return [{"type": "function", "function": function} for function in functions]


def test_calls_of_strict_tools_follow_a_grammar_in_free_text() -> None:
    one, request = use(MARKED, "[TOOL_CALLS]", tools=strict_tools(True, None))
    grammar = request.constraint.tool_calls
    assert (grammar.mark, grammar.mark_only_at_start) == ("[TOOL_CALLS]", False)
    assert [json.loads(tool.parameters) for tool in grammar.tools] == [
        SUM | {"additionalProperties": False},
        {"type": "object"},
    ]
    parser = one.parser(in_thought=False)
    assert parser
    assert parser.push("Let me see.") == [Text("Let me see.")]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": strict_tools(False, None)},
        {"tools": strict_tools(True), "tool_choice": "none"},
        {"tools": strict_tools(True, minProperties=1)},
        {"tools": strict_tools(True, description="x" * 70_000)},
    ],
)
def test_calls_that_no_grammar_can_hold_stay_free(fields: dict[str, Any]) -> None:
    _, request = use(TAGS, **fields)
    assert not request.HasField("constraint")


@pytest.mark.parametrize(
    ("template", "tools", "reason"),
    [
        (TAGS, strict_tools(True, minProperties=1), "a tool's schema cannot be written in the model's form (glm)"),
        (TAGS, strict_tools(True, description="x" * 70_000), "the schemas of all tools together are too large"),
        (PLAIN, strict_tools(True), ""),
        (TAGS, strict_tools(False, minProperties=1), ""),
    ],
)
def test_strict_tools_that_have_no_effect_are_a_warning(template: str, tools: Any, reason: str) -> None:
    one, _ = use(template, tools=tools)
    assert one.warnings == ([f"strict has no effect: {reason}"] if reason else [])


def test_another_constraint_wins_over_strict_tools() -> None:
    _, request = chat_request(tools=strict_tools(True), guided_regex="a+")
    assert request.constraint.regex == "a+"
    _, request = chat_request(tools=strict_tools(True), response_format=FORMAT)
    assert not request.constraint.tool_calls.mark


def test_a_field_that_no_constraint_takes_is_refused_beside_strict_tools() -> None:
    with pytest.raises(InvalidField, match=r"min_tokens cannot be combined with tools\[1\]\.function\.strict"):
        chat_request(tools=strict_tools(None, True), min_tokens=3)
