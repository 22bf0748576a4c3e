"""Messages for bodies of the wrong type or out of range."""

from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from services.gateway.http.openai.requests import ChatCompletionRequest, CompletionRequest
from services.runtime.http.validation import violation

MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize(
    ("kind", "body", "path", "message"),
    [
        (CompletionRequest, {}, "prompt", "prompt is missing"),
        (CompletionRequest, [], "", "the body must be an object, not []"),
        (
            CompletionRequest,
            {"prompt": 5},
            "prompt",
            "prompt must be a string, an array of strings, an array of integers or ",
        ),
        (CompletionRequest, {"prompt": [1, 1.5]}, "prompt[1]", "prompt[1] must be an integer, not 1.5"),
        (CompletionRequest, {"prompt": ["a", 5]}, "prompt[1]", "prompt[1] must be a string, not 5"),
        (CompletionRequest, {"prompt": [[1], [2, "a"]]}, "prompt[1][1]", 'prompt[1][1] must be an integer, not "a"'),
        (
            CompletionRequest,
            {"prompt": "a", "stop": {}},
            "stop",
            "stop must be a string or an array of strings, not {}",
        ),
        (
            CompletionRequest,
            {"prompt": "a", "seed": 2**63},
            "seed",
            f"seed must be between {-(2**63)} and {2**63 - 1}, ",
        ),
        (CompletionRequest, {"prompt": "a", "suffix": "x"}, "suffix", "suffix is not supported"),
        (CompletionRequest, {"prompt": "a", "top_k": True}, "top_k", "top_k must be an integer, not true"),
        (CompletionRequest, {"prompt": "a", "": 1}, "", '"" is not a field of this request'),
        (
            CompletionRequest,
            {"prompt": "a", "x" * 5000: 1},
            "x" * 80 + "...",
            "x" * 80 + "... is not a field of this request",
        ),
        (CompletionRequest, {"prompt": "a", "add_special_tokens": "y"}, "add_special_tokens", 'must be true, not "y"'),
        (CompletionRequest, {"prompt": "a", "user": ["b" * 99]}, "user", f'user must be a string, not ["{"b" * 78}...'),
        (ChatCompletionRequest, {"messages": [{"content": "a"}]}, "messages[0].role", "messages[0].role is missing"),
        (ChatCompletionRequest, {"messages": MESSAGES, "tool_choice": "x"}, "tool_choice", '"auto" or "required"'),
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
