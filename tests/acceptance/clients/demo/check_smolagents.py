"""smolagents' model with the demo model: it forces a call."""

import json
from typing import ClassVar

from smolagents import ChatMessage, MessageRole, OpenAIModel, Tool

ASKED = [{"type": "text", "text": "Which animal is it?"}]


class Animal(Tool):
    name = "animal"
    description = "Names the animal."
    inputs: ClassVar[dict[str, dict[str, str]]] = {"wild": {"type": "boolean", "description": "Whether it is wild."}}
    output_type = "string"

    def forward(self, wild: bool) -> str:
        return "cat"


def test_a_forced_call_has_valid_arguments(base_url: str) -> None:
    model = OpenAIModel(model_id="demo", api_base=base_url, api_key="none", max_tokens=80)
    said = [ChatMessage(role=MessageRole.USER, content=ASKED)]
    answer = model.generate(said, tools_to_call_from=[Animal()])
    first, *_ = answer.tool_calls or []  # the limit may cut a later one
    given = first.function.arguments
    assert isinstance((json.loads(given) if isinstance(given, str) else given)["wild"], bool)


def test_a_text_is_streamed(base_url: str) -> None:
    model = OpenAIModel(model_id="demo", api_base=base_url, api_key="none", max_tokens=8)
    said = [ChatMessage(role=MessageRole.USER, content=ASKED)]
    assert "".join(part.content or "" for part in model.generate_stream(said))
