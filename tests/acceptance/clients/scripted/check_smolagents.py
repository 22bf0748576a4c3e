"""Agents of smolagents, which force a call in each turn and end with one."""

from typing import Any, ClassVar

import openai
import pytest
from conversation import ANSWER, MODEL, SAID, last_prompt, result_of
from smolagents import ChatMessageToolCall, CodeAgent, OpenAIModel, Tool, ToolCallingAgent
from smolagents.agents import ActionStep
from smolagents.utils import AgentGenerationError


class Weather(Tool):
    name = "weather"
    description = "The weather of a city."
    inputs: ClassVar[dict[str, dict[str, str]]] = {"city": {"type": "string", "description": "Its name."}}
    output_type = "string"

    def forward(self, city: str) -> str:
        return result_of("weather", city=city)


class Trains(Tool):
    name = "trains"
    description = "Trains between two cities."
    inputs: ClassVar[dict[str, dict[str, str]]] = {
        "origin": {"type": "string", "description": "Where they leave."},
        "destination": {"type": "string", "description": "Where they arrive."},
        "passengers": {"type": "integer", "description": "How many travel."},
    }
    output_type = "string"

    def forward(self, origin: str, destination: str, passengers: int) -> str:
        return result_of("trains", origin=origin, destination=destination, passengers=passengers)


def model(base_url: str, key: str) -> OpenAIModel:
    return OpenAIModel(model_id=MODEL, api_base=base_url, api_key=key)


def made(call: ChatMessageToolCall | Any) -> dict[str, Any]:
    return {"name": call.name, "arguments": call.arguments}


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_calls_both_tools(base_url: str, key: str, stream: bool) -> None:
    agent = ToolCallingAgent(tools=[Weather(), Trains()], model=model(base_url, key), stream_outputs=stream)
    if stream:
        *_, last = agent.run(SAID["enforced_question"], stream=True)
        assert last.output == ANSWER
    else:
        assert agent.run(SAID["enforced_question"]) == ANSWER
    steps = [step for step in agent.memory.steps if isinstance(step, ActionStep)]
    called = [made(call) for step in steps for call in step.tool_calls or ()]
    assert sorted(map(str, called[1:3])) == sorted(map(str, SAID["enforced_calls"][1:]))  # they run side by side
    assert [*called[:1], *called[3:]] == [
        SAID["enforced_calls"][0],
        {"name": "final_answer", "arguments": {"answer": ANSWER}},
    ]
    assert all(step.token_usage.output_tokens > 0 for step in steps)
    assert [step.error for step in steps] == [None] * 3
    prompt = last_prompt()
    assert all(result in prompt for result in SAID["enforced_results"])


def test_a_code_agent_gets_its_code(base_url: str, key: str) -> None:
    assert CodeAgent(tools=[], model=model(base_url, key)).run(SAID["code_question"]) == 42


def test_a_wrong_key_shows_in_the_error(base_url: str) -> None:
    agent = ToolCallingAgent(tools=[], model=model(base_url, "wrong"))
    with pytest.raises(AgentGenerationError) as refused:
        agent.run(SAID["enforced_question"])
    assert isinstance(refused.value.__cause__, openai.AuthenticationError)
