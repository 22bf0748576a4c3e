"""Rejections name the invalid field as the HTTP API does."""

import re
from typing import Any

import httpx
import pytest

# A field's path in the gRPC API.
GRPC_NAME = re.compile(r"\b(sampling|stopping|logit_rules|beam_search|prompt|output|cache)\.[a-z]")
MESSAGES = [{"role": "user", "content": "Hi"}]
NAMELESS_CALL = {"role": "assistant", "tool_calls": [{"id": "", "function": {"name": "", "arguments": "{}"}}]}
RESULT = {"role": "tool", "tool_call_id": "2", "content": "5"}
CRITIC = {"role": "critic", "content": "No."}
LAST = {"role": "assistant", "content": "So"}


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": function}


UNKNOWN_TYPE = tool(name="y", parameters={"type": "object", "properties": {"a": {"type": "text"}}})
# Of chats whose prompts can be rendered: constraints that engines cannot compile, and a length of the output.
REFUSED_LATER: tuple[dict[str, Any], ...] = (
    {"max_tokens": 5000},
    {"guided_regex": "("},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 3}}}},
    {"tools": [tool(name="x"), UNKNOWN_TYPE], "tool_choice": "required"},
    {"tools": [tool(name="x"), UNKNOWN_TYPE], "tool_choice": tool(name="y")},
)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0, "max_tokens": None}, "max_completion_tokens"),
        ({"max_completion_tokens": 4}, "max_tokens"),
        ({"max_tokens": 5000}, "max_tokens"),
        ({"min_tokens": 50}, "min_tokens"),
        ({"min_tokens": 2, "guided_regex": "a+"}, "min_tokens"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [70], "bad_words": ["x", ""]}, "bad_words[1]"),
        ({"bad_words": ["x"], "response_format": {"type": "json_object"}}, "bad_words"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop_token_ids": [1, 99999]}, "stop_token_ids[1]"),
        ({"logit_bias": {"99999": 1}}, "logit_bias[99999]"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1, "05": 2}}, "logit_bias"),
        ({"stop": ""}, "stop"),
        ({"use_beam_search": True, "best_of": 2, "logprobs": True}, "logprobs"),
        ({"guided_json": '{"type": "object", "type": "array"}'}, "guided_json"),
        ({"messages": [*MESSAGES, RESULT]}, "messages[1].tool_call_id"),
        ({"tools": [tool(name="x"), tool(name="y"), tool(name="x")]}, "tools[2].function.name"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"prompt_logprobs": 2, "stream": True}, "prompt_logprobs"),
        ({"model": "gpt-4"}, "model"),
        ({"timeout": 0}, "timeout"),
        ({"best_of": 2}, "best_of"),
        ({"length_penalty": 2}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
        ({"use_beam_search": True, "best_of": 0}, "best_of"),
        ({"use_beam_search": True, "best_of": 2, "temperature": 1}, "temperature"),
        ({"use_beam_search": True, "best_of": 2, "stop": "x"}, "stop"),
        ({"use_beam_search": True, "best_of": 2, "logprobs": True, "top_logprobs": 1}, "top_logprobs"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 3}}}},
            "response_format.json_schema.schema",
        ),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"audio": {}}, "audio"),
        ({"reasoning_effort": ""}, "reasoning_effort"),
        ({"enable_thinking": "no"}, "enable_thinking"),
        ({"messages": [{"role": "user", "content": "x", "reasoning": "y"}]}, "messages[0].reasoning"),
        ({"nonsense": 1}, "nonsense"),
        ({"stream_options": {"nonsense": 1}}, "stream_options.nonsense"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [tool(name="x")], "tool_choice": tool(name="other")}, "tool_choice"),
        (
            {"tools": [tool(name="x")], "tool_choice": "required", "guided_regex": "x"},
            "tool_choice",
        ),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [tool(name="")]}, "tools[0].function.name"),
        ({"tools": [tool(name="x"), tool(name="")], "tool_choice": "required"}, "tools[1].function.name"),
        ({"tools": [tool(name="x", parameters={"type": "string"})]}, "tools[0].function.parameters"),
        ({"tools": [tool(name="x"), UNKNOWN_TYPE], "tool_choice": "required"}, "tools[1].function.parameters"),
        ({"tools": [tool(name="x"), UNKNOWN_TYPE], "tool_choice": tool(name="y")}, "tools[1].function.parameters"),
        ({"tools": [tool(name="x")], "tool_choice": "required", "stop_token_ids": [99999]}, "stop_token_ids[0]"),
        ({"tools": [tool(name="x")], "tool_choice": "required", "stop": [""]}, "stop[0]"),
        ({"messages": [{"role": "user", "content": "x " * 3000}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x " * 3000}], "prompt_logprobs": 0}, "messages"),
        ({"messages": [NAMELESS_CALL]}, "messages[0].tool_calls[0].function.name"),
        ({"messages": [*MESSAGES, {"role": "", "content": "x"}]}, "messages[1].role"),
        ({"messages": [CRITIC]}, "messages"),
        ({"continue_final_message": True}, "continue_final_message"),
        (
            {"messages": [LAST], "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ({"chat_template_kwargs": {"add_generation_prompt": 1}}, "chat_template_kwargs.add_generation_prompt"),
        ({"chat_template_kwargs": {"a": "x" * 16_384}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
        ({"functions": [{"name": "f"}]}, "functions"),
    ],
)
def test_a_rejection_names_the_invalid_field(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 8, **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (404 if param == "model" else 400, param), error
    rendered = http.post("/v1/chat/completions/render", json={"messages": MESSAGES, "max_tokens": 8, **body})
    assert rendered.status_code == 200 if body in REFUSED_LATER else rendered.json() == answer.json()
    assert param.partition("[")[0].partition(".")[0] in error["message"]
    assert not GRPC_NAME.search(error["message"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["x", ""]}, "prompt[1]"),
        ({"prompt": ["x", ""], "echo": True}, "prompt[1]"),
        ({"prompt": [[1], [1, 99999]]}, "prompt[1][1]"),
        ({"prompt": [[1], [1, 99999999999]]}, "prompt[1][1]"),
        ({"prompt": ["x"] * 129}, "prompt"),
        ({"prompt": [99999]}, "prompt[0]"),
        ({"prompt": ["x", 5]}, "prompt[1]"),
        ({"prompt": "x", "logprobs": 21}, "logprobs"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "add_special_tokens": False}, "add_special_tokens"),
        ({"prompt": "x", "use_beam_search": True, "best_of": 2, "max_tokens": 0}, "max_tokens"),
    ],
)
def test_a_rejection_names_the_invalid_prompt(http: httpx.Client, body: dict[str, Any], param: str) -> None:
    answer, rendered = (http.post(path, json=body) for path in ("/v1/completions", "/v1/completions/render"))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert rendered.json() == answer.json()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"top_k": -2}, "top_k must be at least -1, not -2"),
        ({"use_beam_search": True, "logprobs": True}, "logprobs cannot be combined with use_beam_search"),
        ({"stop": ""}, "stop must have between 1 and 1024 bytes, not 0"),
        ({"guided_json": '{"type": 1, "type": 2}'}, "guided_json: the key 'type' is duplicated in one object"),
        ({"use_beam_search": True, "best_of": 2, "stop": "x"}, "stop cannot be combined with use_beam_search"),
        ({"tool_choice": "required"}, "tool_choice is 'required', but tools is empty"),
        (
            {"tools": [tool(name="x"), UNKNOWN_TYPE], "tool_choice": tool(name="y")},
            "tools[1].function.parameters: #/properties/a/type must be one or several of array, boolean, integer, "
            'null, number, object, string, not "text"',
        ),
        (
            {"tools": [tool(name="x", parameters={"type": ["object", "null"]})]},
            'tools[0].function.parameters must be a JSON schema of type \'object\', not ["object", "null"]',
        ),
        (
            {"messages": [CRITIC]},
            "messages: The chat template does not accept this conversation: No critic may begin.",
        ),
        (
            {"chat_template_kwargs": {"bos_token": "x"}},
            "chat_template_kwargs.bos_token: The chat template has its own value.",
        ),
        (
            {"messages": [LAST], "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message cannot be combined with add_generation_prompt",
        ),
        (
            {"tools": [tool(name="x")], "tool_choice": tool(name="other")},
            "tool_choice names 'other', which is not in tools",
        ),
    ],
)
def test_a_rejection_has_the_names_and_bounds_of_the_http_api(
    http: httpx.Client, body: dict[str, Any], message: str
) -> None:
    answer = http.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 8, **body})
    assert answer.json()["error"]["message"] == message


@pytest.mark.parametrize(
    ("constraint", "name"),
    [
        ({"guided_choice": ["a", "b"]}, "guided_choice"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"guided_json": {"type": "string"}}, "guided_json"),
        ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [tool(name="x")], "tool_choice": "required"}, "tool_choice"),
    ],
)
def test_what_excludes_tokens_beside_a_constraint_is_refused_with_the_names_of_both(
    http: httpx.Client, constraint: dict[str, Any], name: str
) -> None:
    for field, value in (("min_tokens", 1), ("ignore_eos", True), ("allowed_token_ids", [5]), ("bad_words", ["x"])):
        body = {"messages": MESSAGES, "max_tokens": 8, field: value, **constraint}
        error = http.post("/v1/chat/completions", json=body).json()["error"]
        assert (error["message"], error["param"]) == (f"{field} cannot be combined with {name}", field)


def test_a_reference_out_of_a_schema_is_refused_by_field_and_reference(http: httpx.Client) -> None:
    body = {"messages": MESSAGES, "max_tokens": 8, "guided_json": {"items": {"$ref": "#/$defs/a"}}}
    error = http.post("/v1/chat/completions", json=body).json()["error"]
    assert error["message"] == 'guided_json: #/items/$ref is "#/$defs/a", which is not in the schema'


def test_a_model_without_a_name_is_not_that_of_an_empty_field(http: httpx.Client) -> None:
    for path in ("/v1/models/", "/v1//models"):
        assert http.get(path).status_code == 404


def test_fields_without_effect_are_accepted(http: httpx.Client) -> None:
    harmless = {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"}
    harmless |= {"parallel_tool_calls": True}
    harmless |= {"modalities": ["text"], "stop": None, "tools": None, "response_format": {"type": "text"}, "best_of": 1}
    harmless |= {"length_penalty": 1.0, "prompt_cache_key": "k", "safety_identifier": "s", "reasoning_effort": None}
    plain, same = [
        http.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 8, "seed": 1, **fields}).json()
        for fields in ({}, harmless)
    ]
    assert plain["choices"] == same["choices"]


def test_a_request_past_its_deadline_gets_504(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 900, "ignore_eos": True, "timeout": 0.05})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_passed")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x " * 3000}]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x " * 30_000}]}, "messages"),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_completion_tokens": 5000}, "max_completion_tokens"),
        ("/v1/completions", {"prompt": "x " * 3000}, "prompt"),
        ("/v1/completions", {"prompt": [5] * 3000}, "prompt"),
        ("/v1/completions", {"prompt": ["a", "x " * 3000]}, "prompt[1]"),
        ("/v1/completions", {"prompt": "a", "max_tokens": 2048}, "max_tokens"),
        ("/v1/responses", {"input": "x " * 3000}, "input"),
    ],
)
def test_what_exceeds_the_context_has_the_code_and_the_words_that_clients_recognise(
    http: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    answer = http.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, "context_length_exceeded"), error
    assert error["message"].endswith("this model's maximum context length is 2048 tokens (context_length_exceeded)")
