"""litellm with the demo model: forced calls over chats and messages, and a response."""

import json
import os
from typing import Any

import pytest

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it downloads prices

import litellm

ASK: Any = [{"role": "user", "content": "Which animal is it?"}]
SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}}, "required": ["kind"]}
TOOLS = [{"type": "function", "function": {"name": "animal", "parameters": {**SCHEMA, "additionalProperties": False}}}]


@pytest.mark.parametrize("kind", ["openai", "hosted_vllm", "anthropic"])
def test_a_tool_is_called_if_it_must_be(base_url: str, root_url: str, kind: str) -> None:
    settings: Any = {"model": f"{kind}/demo", "api_base": root_url if kind == "anthropic" else base_url}
    made = litellm.completion(
        **settings, api_key="none", messages=ASK, tools=TOOLS, tool_choice="required", max_tokens=80
    )
    first, *_ = made.choices[0].message.tool_calls  # the limit may cut a later one
    assert json.loads(first.function.arguments)["kind"] in ("cat", "dog")


def test_a_response_has_a_text(base_url: str) -> None:
    made = litellm.responses(
        model="openai/demo", api_base=base_url, api_key="none", input="Why is the sky blue?", max_output_tokens=16
    )
    assert made.usage.output_tokens <= 16
    assert made.output[0].content[0].text
