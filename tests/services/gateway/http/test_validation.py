"""Messages for bodies of the wrong type or out of range."""

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from services.gateway.http.openai.requests import ChatCompletionRequest, CompletionRequest
from services.gateway.http.openai.responses_api.request_schemas import ResponsesRequest
from services.runtime.http.validation import violation

MESSAGES = [{"role": "user", "content": "Hello"}]
PARTS = [{"type": "input_text", "text": "Hello"}, {"type": "input_image", "image_url": "x"}]
CALL = {"type": "function_call", "call_id": "1", "name": "sum", "arguments": "{}"}
NOT_STORED = "is not supported: responses are not stored, because gateways share no state"


@pytest.mark.parametrize(
    ("kind", "body", "path", "message"),
    [
        (CompletionRequest, {}, "prompt", "prompt is missing"),
        (CompletionRequest, [], "", "the body must be an object, not an array of 0 entries"),
        (
            CompletionRequest,
            {"prompt": 5},
            "prompt",
            "prompt must be a string, an array of strings, an array of integers or ",
        ),
        (CompletionRequest, {"prompt": [1, 1.5]}, "prompt[1]", "prompt[1] must be an integer, not 1.5"),
        (
            CompletionRequest,
            {"prompt": [1, "a"]},
            "prompt[1]",
            "prompt[1] must be an integer, not a string of 1 character",
        ),
        (CompletionRequest, {"prompt": ["a", 5]}, "prompt[1]", "prompt[1] must be a string, not 5"),
        (
            CompletionRequest,
            {"prompt": [[1], [2, "a"]]},
            "prompt[1][1]",
            "prompt[1][1] must be an integer, not a string of 1 character",
        ),
        (
            CompletionRequest,
            {"prompt": "a", "stop": {}},
            "stop",
            "stop must be a string or an array of strings, not an object",
        ),
        (
            CompletionRequest,
            {"prompt": "a", "seed": 2**63},
            "seed",
            f"seed must be between {-(2**63)} and {2**63 - 1}, ",
        ),
        (CompletionRequest, {"prompt": "a", "suffix": "x"}, "suffix", "suffix is not supported"),
        (CompletionRequest, {"prompt": "a", "top_k": True}, "top_k", "top_k must be an integer, not true"),
        (CompletionRequest, {"prompt": "a", "": 1}, '[""]', '[""] is not a field of this request'),
        (
            CompletionRequest,
            {"prompt": "a", "x" * 5000: 1},
            "x" * 80 + "...",
            "x" * 80 + "... is not a field of this request",
        ),
        (
            CompletionRequest,
            {"prompt": "a", "add_special_tokens": "y"},
            "add_special_tokens",
            "not supported: it can only be true",
        ),
        (
            CompletionRequest,
            {"prompt": "a", "user": ["b" * 99]},
            "user",
            "user must be a string, not an array of 1 entry",
        ),
        (ChatCompletionRequest, {"messages": [{"content": "a"}]}, "messages[0].role", "messages[0].role is missing"),
        (ChatCompletionRequest, {"messages": MESSAGES, "tool_choice": "x"}, "tool_choice", '"auto" or "required"'),
        (
            ChatCompletionRequest,
            {"messages": MESSAGES, "tools": [{"type": "retrieval"}]},
            "tools[0].type",
            'must be "function", not "retrieval"',
        ),
        (ResponsesRequest, {}, "input", "input is missing"),
        (ResponsesRequest, {"input": 5}, "input", "input must be a string or an array, not 5"),
        (ResponsesRequest, {"input": ["x"]}, "input[0]", "input[0] must be an object, not a string of 1 character"),
        (ResponsesRequest, {"input": [{"role": "user"}]}, "input[0].content", "input[0].content is missing"),
        (
            ResponsesRequest,
            {"input": [{"role": "tool", "content": "x"}]},
            "input[0].role",
            'or "developer", not "tool"',
        ),
        (
            ResponsesRequest,
            {"input": [{"role": "user", "content": PARTS}]},
            "input[0].content[1].image_url",
            "must be left out, because the model reads text only",
        ),
        (
            ResponsesRequest,
            {"input": [*MESSAGES, {"type": "item_reference", "id": "x"}]},
            "input[1].type",
            "is not supported: responses are not stored, because gateways share no state; send the item itself",
        ),
        (
            ResponsesRequest,
            {"input": "x", "tools": [{"type": "teleport", "to": "x"}]},
            "tools[0].type",
            "tools[0].type must be one of function, custom, namespace, web_search",
        ),
        (
            ResponsesRequest,
            {"input": [*MESSAGES, {**CALL, "async": True, "caller": None}]},
            "input[1].async",
            "input[1].async is not a field of this request",
        ),
        (
            ResponsesRequest,
            {"input": "x", "tools": [{"type": "custom", "name": "x", "format": {"type": "xml"}}]},
            "tools[0].format.type",
            'tools[0].format.type must be one of text, grammar, not "xml"',
        ),
        (
            ResponsesRequest,
            {"input": "x", "tool_choice": {"type": "file_search"}},
            "tool_choice.type",
            "tool_choice.type is not supported: built-in tools are not run",
        ),
        (ResponsesRequest, {"input": "x", "store": "yes"}, "store", "store must be true or false, not a string"),
        (ResponsesRequest, {"input": "x", "include": ["x"]}, "include[0]", '"web_search_call.results", not "x"'),
        (
            ResponsesRequest,
            {"input": "x", "context_management": [{"type": "compaction"}]},
            "context_management",
            "context_management is not supported: conversations are not compacted",
        ),
        (ResponsesRequest, {"input": "x", "background": True}, "background", f"background {NOT_STORED}"),
        (
            ResponsesRequest,
            {"input": "x", "previous_response_id": "resp_1"},
            "previous_response_id",
            f"previous_response_id {NOT_STORED}; send the whole conversation as input",
        ),
        (ResponsesRequest, {"input": "x", "conversation": {"id": "x"}}, "conversation", f"conversation {NOT_STORED}"),
        (ResponsesRequest, {"input": "x", "prompt": {"id": "x"}}, "prompt", "send instructions and input"),
        (
            ResponsesRequest,
            {"input": "x", "reasoning": {"context": "all_turns"}},
            "reasoning.context",
            'must be "auto", not "all_turns"',
        ),
        (ResponsesRequest, {"input": "x", "n": 2}, "n", "n must be 1, not 2"),
        (ResponsesRequest, {"input": "x", "response_format": {}}, "response_format", "is not supported"),
        (ResponsesRequest, {"input": "x", "max_tokens": 2}, "max_tokens", "max_tokens is not a field of this request"),
    ],
)
def test_an_invalid_body_is_described_by_its_path_and_value(
    kind: type[BaseModel], body: Any, path: str, message: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    found = violation(caught.value.errors(), body)
    assert found.path == path
    assert message in found.message


def test_unknown_members_of_an_input_item_are_ignored_if_they_are_null() -> None:
    dumped = {"async": None, "async_": None, "namespace": None}
    part = {"type": "output_text", "text": "Well.", **dumped}
    items = [
        {"type": None, "role": "assistant", "content": [part], **dumped},
        {**CALL, **dumped},
        {"type": "function_call_output", "call_id": "1", "output": "2", **dumped},
    ]
    message, call, result = ResponsesRequest.model_validate({"input": items}).input
    assert (message.content[0].text, call.name, result.output) == ("Well.", "sum", "2")


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatCompletionRequest, {"messages": [{}] * 100_000}),
        (CompletionRequest, {"prompt": [None] * 100_000}),
        (ResponsesRequest, {"input": [{}] * 100_000}),
    ],
)
def test_validation_of_a_list_ends_at_its_first_error(kind: type[BaseModel], body: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() < 10


MANY = {f"x{number}": "y" for number in range(100_000)}


@pytest.mark.parametrize(
    ("kind", "body", "path"),
    [
        (CompletionRequest, {"prompt": "a", **MANY}, "x0"),
        (CompletionRequest, {"prompt": "a", "logit_bias": MANY}, "logit_bias.x0"),
        (CompletionRequest, {"prompt": "a", "structured_outputs": MANY}, "structured_outputs.x0"),
        (CompletionRequest, {"prompt": "a", "metadata": dict.fromkeys(MANY, 5)}, "metadata.x0"),
        (CompletionRequest, {"prompt": "a", "stop": [5] * 100_000}, "stop[0]"),
        (ChatCompletionRequest, {"messages": [MESSAGES[0] | MANY] * 9}, "messages[0].x0"),
        (ResponsesRequest, {"input": [{"role": "user", "content": [PARTS[0] | MANY]}]}, "input[0].content[0].x0"),
        (ResponsesRequest, {"input": "a", "tools": [MANY] * 1000}, "tools[0].type"),
    ],
)
def test_a_body_with_very_many_errors_is_validated_up_to_the_first_few(
    kind: type[BaseModel], body: Any, path: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() < 100
    assert violation(caught.value.errors(), body).path == path


def test_members_are_validated_whatever_their_number() -> None:
    biases = {str(number): 0.5 for number in range(1000)}
    assert CompletionRequest(prompt="a", logit_bias=biases).logit_bias == biases
    with pytest.raises(ValidationError):
        CompletionRequest(prompt="a", logit_bias=biases | {"last": "x"})
