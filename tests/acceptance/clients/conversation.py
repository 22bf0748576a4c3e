"""The conversation that each client has with the scripted engine: two tools, three turns, a parallel call, thoughts."""

import json
import os
from pathlib import Path
from typing import Any

SAID: dict[str, Any] = json.loads((Path(__file__).parent / "conversation.json").read_text())
MODEL, SYSTEM, QUESTION, ANSWER, REMARK = (SAID[name] for name in ("model", "system", "question", "answer", "remark"))
THOUGHTS: list[str] = SAID["thoughts"]
CALLS: list[dict[str, Any]] = SAID["calls"]
RESULTS: list[str] = SAID["results"]
TOOLS: list[dict[str, Any]] = SAID["tools"]
_PAIRS = [*zip(CALLS + SAID["enforced_calls"], RESULTS + SAID["enforced_results"], strict=True)]
# Longer than the engine's context, in every tokenizer.
OVERFLOW = "train " * 20_000


def result_of(name: str, **arguments: Any) -> str:
    """Return the result of a call of a tool. Raises KeyError for one that is not in the conversation."""
    for call, result in _PAIRS:
        if (call["name"], call["arguments"]) == (name, arguments):
            return result
    raise KeyError(f"{name} {arguments}")


def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: Its name.
    """
    return result_of("weather", city=city)


def trains(origin: str, destination: str, passengers: int) -> str:
    """Trains between two cities.

    Args:
        origin: Where they leave.
        destination: Where they arrive.
        passengers: How many travel.
    """
    return result_of("trains", origin=origin, destination=destination, passengers=passengers)


def last_prompt() -> str:
    """Return the latest prompt that the engine received."""
    lines = Path(os.environ["PROMPTS"]).read_text().splitlines()
    prompt: str = json.loads(lines[-1])
    return prompt


def check_prompt(*, thoughts: bool = False, system: str = SYSTEM) -> None:
    """Check that the engine received all calls and results in order, and the thoughts if the client sends them."""
    prompt = last_prompt()
    places = [prompt.index(text) for text in (system, QUESTION, REMARK, *RESULTS)]
    assert places == sorted(places), prompt
    for call in CALLS:
        assert json.dumps(call, ensure_ascii=False) in prompt, prompt
    assert all((thought in prompt) == thoughts for thought in THOUGHTS), prompt
