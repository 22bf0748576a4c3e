import json
import re
from typing import Any

import httpx
import pytest

from quire.v1 import gateway_pb2
from services.gateway.text.tool_calls import (
    ArgumentsDelta,
    BareCallParser,
    EnforcedCallParser,
    MarkedCallParser,
    TaggedCallParser,
    ToolCall,
    ToolCallParser,
    ToolCallStart,
)
from tests.running_quire import RunningQuire
from tests.services.gateway.http.responses import events

SUM = {"type": "object", "properties": {"a": {"$ref": "#/$defs/digit"}}, "required": ["a"]}
SUM |= {"additionalProperties": False, "$defs": {"digit": {"enum": [1, 2, 3]}}}
TOOLS = [
    {"type": "function", "function": {"name": "sum", "description": "Adds.", "parameters": SUM, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]
SUM_CALL = {"type": "function", "function": {"name": "sum"}}
ASK = {"messages": [{"role": "user", "content": "What time is it?"}], "tools": TOOLS, "max_tokens": 150, "seed": 4}


def parse(parser: ToolCallParser, text: str, size: int) -> list[Any]:
    """Parse a text in pieces of `size`; return the parts, with adjacent texts joined."""
    pieces: list[Any] = []
    for at in range(0, len(text), size):
        pieces += parser.push(text[at : at + size])
    joined: list[Any] = []
    for piece in [*pieces, *parser.finish()]:
        if isinstance(piece, str) and joined and isinstance(joined[-1], str):
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined


CALL_A, CALL_B = '{"name":"a","arguments":{"x":1}}', '{"name": "b", "arguments": {}}'
A, SPACED = ToolCall("a", '{"x":1}'), ToolCall("a", '{"x": 1}')
B = ToolCall("b", "{}")
TAG = ToolCall("a", '{"x":"\\"</tool_call>\\\\"}')
TAG_IN_STRING = f'{{"name":"a","arguments":{TAG.arguments}}}'
CALLED_B = f"<tool_call>{CALL_B}</tool_call>"
MARK_IN_STRING = '{"x":"[TOOL_CALLS]"}'
NO_CALLS = [
    f"<tool_call>{body}</tool_call>"
    for body in (
        '{"name": "c", "arguments": {}}',
        '{"name": "a"}',
        '{"name": ["a"], "arguments": {}}',
        '{"name": "a", "arguments": [1]}',
        '{"name": "a", "arguments": {"x": }}',
        '{"name": "a" "arguments": {}}',
        f'{CALL_A}{{"name": "c", "arguments": {{}}}}',
    )
]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("parser", "text", "pieces"),
    [
        (TaggedCallParser, "1 < 2 <tool", ["1 < 2 <tool"]),
        (TaggedCallParser, 'Well. <tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>', ["Well. ", SPACED]),
        (TaggedCallParser, f"<tool_call>{CALL_A}</tool_call>\n<tool_call>{CALL_B}</tool_call>\n", [A, B]),
        (TaggedCallParser, '<tool_call>{"name":"a","arguments":"{\\"x\\":1}"}', [A]),
        (TaggedCallParser, f"<tool_call>[{CALL_A},{CALL_B}]</tool_call>", [A, B]),
        (TaggedCallParser, "<tool_call>what?</tool_call> no", ["<tool_call>what?</tool_call> no"]),
        (MarkedCallParser, f"So [TOOL [TOOL_CALLS] [{CALL_A},{CALL_B}]", ["So [TOOL ", A, B]),
        (MarkedCallParser, '[TOOL_CALLS]a[ARGS]{"x":1}[TOOL_CALLS]b{}', [A, B]),
        (TaggedCallParser, f"<tool_call>{TAG_IN_STRING}</tool_call>{CALL_B}", [TAG, CALL_B]),
        (TaggedCallParser, f'<tool_call>"</tool_call> {CALLED_B}', ['<tool_call>"</tool_call> ', B]),
        (TaggedCallParser, f'<tool_call>"\n</tool_call> {CALLED_B}', ['<tool_call>"\n</tool_call> ', B]),
        (TaggedCallParser, f"<tool_call>{TAG_IN_STRING[:-5]}", [f"<tool_call>{TAG_IN_STRING[:-5]}"]),
        (MarkedCallParser, f"[TOOL_CALLS]a{MARK_IN_STRING}[TOOL_CALLS]b{{}}", [ToolCall("a", MARK_IN_STRING), B]),
        (MarkedCallParser, '[TOOL_CALLS]"[TOOL_CALLS]b{}', ['[TOOL_CALLS]"', B]),
        (MarkedCallParser, "[TOOL_CALLS]oops", ["[TOOL_CALLS]oops"]),
        (MarkedCallParser, '[TOOL_CALLS]a{"x":1}[TOOL_CALLS]c{}', [A, "[TOOL_CALLS]c{}"]),
        (BareCallParser, '{"name": "a", "parameters": {"x": 1}}; {"name": "b", "parameters": {}}', [SPACED, B]),
        (BareCallParser, '<|python_tag|>{"type": "function", "name": "a", "parameters": {"x": 1}}', [SPACED]),
        (BareCallParser, '{"nameless": 1}', ['{"nameless": 1}']),
        (BareCallParser, '{"name": "a", "parameters": {"x', ['{"name": "a", "parameters": {"x']),
        (BareCallParser, "plain", ["plain"]),
        *((TaggedCallParser, text, [text]) for text in NO_CALLS),
    ],
)  # fmt: skip
def test_calls_are_parsed_from_text_in_pieces_of_any_size(
    parser: type[Any], text: str, pieces: list[Any], size: int
) -> None:
    assert parse(parser({"a", "b"}), text, size) == pieces


@pytest.mark.parametrize("arguments", ['{"x":1,"x" : 2.0}', "{\n}", '{"x":"\\u00fc/\\/"}', '{ "x": [1e2, -0] }'])
def test_arguments_are_those_that_the_model_wrote(arguments: str) -> None:
    call = ToolCall("a", arguments)
    assert parse(TaggedCallParser({"a"}), f'<tool_call>{{"name":"a","arguments":{arguments}}}</tool_call>', 1) == [call]
    assert parse(MarkedCallParser({"a"}), f"[TOOL_CALLS]a{arguments}", 1) == [call]
    assert parse(BareCallParser({"a"}), f'{{"name": "a", "parameters" : {arguments} }}', 1) == [call]


ENFORCED_A = '<tool_call>\n{"name": "a", "arguments": {"x": "}\\"", "y": [{}]}}\n</tool_call>'
ENFORCED_B = '<tool_call>\n{"name": "\\"b\\"", "arguments": {}}\n</tool_call>'
LIST = '[{"name": "a", "arguments": {"x": "}\\"", "y": [{}]}}, {"name":"\\"b\\"","arguments":{}}]'


def enforced(text: str, size: int) -> list[str]:
    """Parse a text in pieces of `size`; return each call as its name, a colon and its arguments."""
    parser, calls = EnforcedCallParser(), list[str]()
    pieces = [piece for at in range(0, len(text), size) for piece in parser.push(text[at : at + size])]
    for piece in [*pieces, *parser.finish()]:
        if isinstance(piece, ToolCallStart):
            calls.append(f"{piece.name}:")
        else:
            assert isinstance(piece, ArgumentsDelta)
            assert piece.text
            calls[-1] += piece.text
    return calls


@pytest.mark.parametrize("text", [f"{ENFORCED_A}\n{ENFORCED_B}\n", LIST])
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_an_enforced_call_that_is_cut_has_the_arguments_so_far_and_no_other_text(text: str, size: int) -> None:
    arguments = '{"x": "}\\"", "y": [{}]}'
    start = text.index("{", text.index("arguments"))
    for end in range(len(text) + 1):
        calls = enforced(text[:end], size)
        assert calls[:1] == ([f"a:{arguments}"[: 2 + end - start]] if end > start else [])
        assert calls[1:] in ([], ['"b":{'], ['"b":{}'])
    assert calls == [f"a:{arguments}", '"b":{}']


def test_arguments_of_an_enforced_call_are_passed_on_while_they_are_written() -> None:
    parser = EnforcedCallParser()
    assert parser.push(ENFORCED_A.partition("}")[0]) == [ToolCallStart("a"), ArgumentsDelta('{"x": "')]
    assert parser.push("}") == [ArgumentsDelta("}")]


def test_text_that_cannot_become_a_call_is_returned_at_once() -> None:
    assert TaggedCallParser({"a"}).push("1 < 2, <b") == ["1 < 2, <b"]
    assert TaggedCallParser({"a"}).push("so: <tool_") == ["so: "]
    assert MarkedCallParser({"a"}).push("[1] [TOOL") == ["[1] "]
    assert BareCallParser({"a"}).push("{1}") == ["{1}"]


def called(http: httpx.Client, **body: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the tool calls and the choice of a response, after a check that a stream has the same."""
    response = http.post("/v1/chat/completions", json={**ASK, **body})
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    calls = choice["message"].get("tool_calls", [])
    streamed, content, reason = [], "", None
    for event in events(http.post("/v1/chat/completions", json={**ASK, **body, "stream": True})):
        part = event["choices"][0]
        content += part["delta"].get("content", "")
        reason = part["finish_reason"]
        for call in part["delta"].get("tool_calls", []):
            if call["index"] == len(streamed):
                streamed.append({"name": "", "arguments": ""})
            for key, value in call["function"].items():
                streamed[call["index"]][key] += value
    assert streamed == [call["function"] for call in calls]
    assert (content, reason) == (choice["message"]["content"] or "", choice["finish_reason"])
    return calls, choice


def test_a_required_call_follows_the_schema_of_its_tool(http: httpx.Client) -> None:
    calls, choice = called(http, tool_choice="required", parallel_tool_calls=False)
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert len(calls) == 1
    arguments = json.loads(calls[0]["function"]["arguments"])
    assert calls[0]["function"]["name"] in ("sum", "now")
    assert arguments == {} if calls[0]["function"]["name"] == "now" else arguments["a"] in (1, 2, 3)


def test_several_calls_can_be_required_at_once(http: httpx.Client) -> None:
    end, new_line = [http.post("/tokenize", json={"prompt": text}).json()["tokens"][0] for text in ("<|end|>", "\n")]
    bias = {str(end): -100, str(new_line): 50}
    calls, choice = called(http, tool_choice="required", logit_bias=bias, max_tokens=400)
    assert len(calls) > 1
    assert len({call["id"] for call in calls}) == len(calls)
    assert choice["message"]["content"] is None


def test_a_named_tool_is_called(http: httpx.Client) -> None:
    calls, _ = called(http, tool_choice=SUM_CALL)
    assert [call["function"]["name"] for call in calls] == ["sum"]
    assert json.loads(calls[0]["function"]["arguments"])["a"] in (1, 2, 3)


def test_a_required_call_that_max_tokens_cuts_has_the_arguments_so_far(http: httpx.Client) -> None:
    whole, _ = called(http, tool_choice=SUM_CALL)
    for max_tokens in range(1, 60, 4):
        calls, choice = called(http, tool_choice=SUM_CALL, max_tokens=max_tokens)
        if choice["finish_reason"] == "tool_calls":
            break
        assert choice["finish_reason"] == "length"
        assert choice["message"]["content"] == (None if calls else "")
        for call in calls:
            assert whole[0]["function"]["arguments"].startswith(call["function"]["arguments"])
    assert max_tokens > 20


def test_a_required_call_is_not_ended_by_stop_strings_or_stop_tokens(http: httpx.Client) -> None:
    stops = {"stop": ["\n", '"', "}", "</tool_call>"], "include_stop_str_in_output": True}
    stops["stop_token_ids"] = http.post("/tokenize", json={"prompt": '{"a":1'}).json()["tokens"]
    calls, choice = called(http, tool_choice=SUM_CALL, **stops)
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", None)
    assert json.loads(calls[0]["function"]["arguments"])["a"] in (1, 2, 3)


def test_a_call_of_a_tool_that_was_not_offered_stays_text(http: httpx.Client) -> None:
    text = '<tool_call>{"name": "other", "arguments": {}}</tool_call>'
    calls, choice = called(http, guided_regex=re.escape(text).replace("\\ ", " "))
    assert (calls, choice["message"]["content"], choice["finish_reason"]) == ([], text, "stop")


def test_a_call_in_the_models_format_is_parsed(http: httpx.Client) -> None:
    text = r'<tool_call>\{"name": "sum", "arguments": \{"a": [123]\}\}</tool_call>'
    calls, choice = called(http, guided_regex=f"Well: {text} {text}")
    assert choice["message"]["content"] == "Well: "
    assert [call["function"]["name"] for call in calls] == ["sum", "sum"]
    calls, _ = called(http, guided_regex=f"{text}{text}", parallel_tool_calls=False)
    assert len(calls) == 1
    calls, choice = called(http, guided_regex=text, tool_choice="none")
    assert calls == []
    assert choice["message"]["content"].startswith("<tool_call>")


def test_tools_and_calls_are_rendered_as_for_grpc(tiny_quire: RunningQuire, http: httpx.Client) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "sum", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    ids = http.post("/tokenize", json={"messages": messages, "tools": TOOLS}).json()["tokens"]
    text = http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert '<|tools|>[{"type": "function", "function": {"name": "sum", "description": "Adds."' in text
    assert '<tool_call>{"name": "sum", "arguments": {"a": 1}}</tool_call>\n<|tool|>2\n' in text
    prompt = gateway_pb2.Prompt()
    prompt.chat.tools.add(name="sum", description="Adds.", parameters=json.dumps(SUM))
    prompt.chat.tools.add(name="now")
    prompt.chat.messages.add(role="user", content="Add.")
    prompt.chat.messages.add(role="assistant").tool_calls.add(id="1", name="sum", arguments='{"a": 1}')
    prompt.chat.messages.add(role="tool", tool_call_id="1", content="2")
    own = tiny_quire.gateway.Tokenize(gateway_pb2.TokenizeRequest(prompt=prompt), timeout=60)
    assert list(own.token_ids) == ids
