import json
import re
from typing import Any

import httpx

from quire.v1 import gateway_pb2
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
    assert choice["message"]["content"] == "Well:"
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
