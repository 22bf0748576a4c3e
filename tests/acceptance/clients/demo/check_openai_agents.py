"""The OpenAI Agents SDK with the demo model: an agent that must call its tool."""

import asyncio
from typing import Any, Literal

import pytest
from agents import (
    Agent,
    AsyncOpenAI,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

set_tracing_disabled(True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model_class", [OpenAIChatCompletionsModel, OpenAIResponsesModel])
def test_the_tool_is_called_with_valid_arguments(base_url: str, model_class: Any, stream: bool) -> None:
    called: list[tuple[str, bool]] = []

    def animal(kind: Literal["cat", "dog"], wild: bool) -> str:
        """Name the animal."""
        called.append((kind, wild))
        return kind

    agent = Agent(
        name="namer",
        tools=[function_tool(animal)],
        model=model_class(model="demo", openai_client=AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)),
        model_settings=ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=80),
        tool_use_behavior="stop_on_first_tool",
    )

    async def run() -> Any:
        if not stream:
            return (await Runner.run(agent, "Which animal is it?")).final_output
        made = Runner.run_streamed(agent, "Which animal is it?")
        async for _ in made.stream_events():
            pass
        return made.final_output

    output = asyncio.run(run())
    assert output in ("cat", "dog")
    assert [kind for kind, _ in called] == [output]
