"""Dialects at the templates that model families have published, and cut anywhere."""

import re
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest

from services.gateway.dialects.events import CallStart
from services.gateway.text.chat_renderer import ChatRenderer
from services.gateway.text.chat_template import ChatTemplate, Conversation
from services.gateway.text.detokenizer import Detokenizer
from services.gateway.text.tokenizer import Tokenizer
from tests.dialect_outputs import DIALECTS, SCHEMA, cut, parsed, random_output, read
from tests.published_templates import published_templates

CONVERSATIONS = 50
CUTS = 200_000
# Templates, and the dialects that their models write.
PUBLISHED = {
    "ByteDance-Seed-OSS": "seed",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "cohere",
    "GLM-4.6": "think+glm",
    "GLM-4.7-Flash": "think+glm",
    "LFM2.5-8B-A1B": "think+lfm2",
    "MiMo-VL": "hermes",
    "MiniMax-M1": "tool-calls",
    "MiniMax-M2": "think+minimax-m2",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "think+qwen3-coder",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "hermes",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "Qwen-QwQ-32B": "think+hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "think+hermes",
    "Qwen3-Coder": "qwen3-coder",
    "Qwen3.5-4B": "think+qwen3-coder",
    "StepFun3.5-Flash": "think+qwen3-coder",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "think+deepseek-v3",
    "deepseek-ai-DeepSeek-V3.1": "think+deepseek-v3.1",
    "deepseek-ai-DeepSeek-V3.2": "think+deepseek-v3.2",
    "deepseek-ai-DeepSeek-V4": "think+deepseek-v4",
    "google-gemma-4-31B-it": "gemma4",
    "ibm-granite-granite-4.0": "hermes",
    "meetkai-functionary-medium-v3.1": "functionary",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3",
    "meta-llama-Llama-3.3-70B-Instruct": "llama3",
    "mistralai-Ministral-3-14B-Reasoning-2512": "mistral",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral-list",
    "moonshotai-Kimi-K2": "kimi-k2",
    "openai-gpt-oss-120b": "harmony",
    "poolside-Laguna-XS-2.1": "think+glm",
}
# Templates that show their form of calls, or of thoughts, without writing it.
DESCRIBED = {
    "NVIDIA-Nemotron-Nano-v2": "think+nemotron",  # it begins thoughts that it does not end
    "Kimi-K2-Thinking": "think+kimi-k2",
    "ibm-granite-granite-3.3-2B-Instruct": "think+granite",
    "microsoft-Phi-3.5-mini-instruct": "hermes",
    "google-gemma-2-2b-it": "hermes",
    "Apertus-8B-Instruct": "plain",
}
# Of several calls in one message.
ONE_CALL = ("Llama-3", "gpt-oss", "functionary")
# Their templates write no text beside calls, or in another message.
ONE_PART = ("gpt-oss", "R1-Distill")
# Their templates write strings between quotes without escapes.
PLAIN_TEXTS = ("LFM2",)
# Their templates recurse without end over unions.
PLAIN_TYPES = ("Hermes-",)
# What ends a turn that calls tools, where other turns have another end.
END = re.compile(r"(<\|eom_id\|>|<\|tool_response>|<\|call\|>|\s*<SPECIAL_12>\s*)$")
PART_OF_MARK = re.compile(r"<[^>]*$")
USER = {"role": "user", "content": "Hello."}


@pytest.fixture(scope="session")
def templates() -> dict[str, str]:
    return published_templates()


def renderer(templates: Mapping[str, str], name: str) -> ChatRenderer:
    return ChatRenderer(ChatTemplate(templates[name], {"bos_token": "<s>", "eos_token": "</s>"}))


@pytest.mark.parametrize("name", [*PUBLISHED, *DESCRIBED])
def test_the_dialect_of_a_published_template_is_found(name: str, templates: dict[str, str]) -> None:
    assert renderer(templates, name).dialect.name == (PUBLISHED | DESCRIBED)[name]


def tools(schema: Mapping[str, Any]) -> list[dict[str, Any]]:
    empty = {"type": "object", "properties": {}}
    schemas = {"look_up": schema, "look_up_word": schema, "now": empty}
    return [
        {"type": "function", "function": {"name": name, "description": "Looks up.", "parameters": one}}
        for name, one in schemas.items()
    ]


def plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: "page" if isinstance(value, str) else value for key, value in arguments.items() if key in ("word", "deep")
    }


def simple(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **schema,
        "properties": {key: one for key, one in schema["properties"].items() if isinstance(one.get("type"), str)},
    }


class Conversations:
    """Renders conversations whose last turn is the output of a model."""

    def __init__(self, made: ChatRenderer, schema: Mapping[str, Any]) -> None:
        self._made = made
        self._tools = tools(schema)
        marked = self._rendered({"role": "assistant", "content": "Quire is here."})
        self._end = marked.partition("Quire is here.")[2]
        thought = made.dialect.thought
        opened, asked = (made.render(Conversation([USER], self._tools, {}, open_turn=one)) for one in (True, False))
        thinking = self._rendered({"role": "assistant", "content": "Hello.", "reasoning": "I think."})
        marks = (thought.start, thought.end) if thought else ("\0", "\0")
        self._asked = PART_OF_MARK.sub("", _common_beginning(asked, marked, thinking)).removesuffix(marks[0])
        self._header = opened.removeprefix(self._asked).partition(marks[0])[0].partition(marks[1])[0]

    def _rendered(self, message: Mapping[str, Any]) -> str:
        return self._made.render(Conversation([USER, message], self._tools, {}, open_turn=False))

    def turn(self, message: Mapping[str, Any]) -> str:
        """Return the rendered turn of the assistant, without its header and its end."""
        text = self._rendered(message)
        assert text.startswith(self._asked)
        turn = text.removeprefix(self._asked).removeprefix(self._header)
        return END.sub("", turn.removesuffix(self._end))


def _common_beginning(*texts: str) -> str:
    shortest = min(texts, key=len)
    ends = (at for at in range(len(shortest), -1, -1) if all(text.startswith(shortest[:at]) for text in texts))
    return shortest[: next(ends)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_read_of_a_turn_is_rendered_as_the_same_turn(name: str, templates: dict[str, str]) -> None:
    made = renderer(templates, name)
    schema = simple(SCHEMA) if any(part in name for part in PLAIN_TYPES) else SCHEMA
    conversations = Conversations(made, schema)
    for seed in range(CONVERSATIONS):
        output = random_output(Random(seed), made.dialect, 1 if any(part in name for part in ONE_CALL) else 3)
        calls = output.calls
        if any(part in name for part in (*PLAIN_TEXTS, *PLAIN_TYPES)):
            calls = [(tool, plain(arguments)) for tool, arguments in calls]
        turn = conversations.turn(
            message(
                output.thought, "" if calls and any(part in name for part in ONE_PART) else output.answer, calls, name
            )
        )
        events = parsed(made.dialect, [turn])
        thought, answer, found = read(events)
        assert found == calls, turn
        assert thought in (output.thought, ""), turn
        ids = [event.id for event in events if isinstance(event, CallStart)]
        again = message(thought, answer, found, name, ids)
        assert conversations.turn(again) == turn, (again, seed)


def message(
    thought: str, answer: str, calls: list[tuple[str, dict[str, Any]]], name: str, ids: list[str] | None = None
) -> dict[str, Any]:
    made: dict[str, Any] = {"role": "assistant", "content": answer or (None if calls and "R1" in name else "")}
    if thought:
        made["reasoning"] = thought
    if calls:
        own = [f"functions.{tool}:{at}" if "Kimi" in name else f"call0000{at}" for at, (tool, _) in enumerate(calls)]
        chosen = [given or one for given, one in zip(ids or own, own, strict=True)]
        made["tool_calls"] = [
            {"type": "function", "id": call_id, "function": {"name": tool, "arguments": arguments}}
            for call_id, (tool, arguments) in zip(chosen, calls, strict=True)
        ]
    return made


def test_200000_random_cuts_change_no_event() -> None:
    draw, done = Random(7), 0
    while done < CUTS:
        dialect = draw.choice(DIALECTS)
        output = random_output(draw, dialect, draw.choice([1, 3, 30]))
        whole = parsed(dialect, [output.text])
        assert read(whole) == (output.thought, output.answer, output.calls), output.text
        for pieces in (list(output.text), *(cut(draw, output.text) for _ in range(20))):
            assert parsed(dialect, pieces) == whole, (dialect.name, pieces)
            done += len(pieces) - 1


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_outputs_in_tokens_and_bytes_have_the_same_events(dialect: Any, demo_model: Path) -> None:
    tokenizer = Tokenizer.load(demo_model)
    for seed in range(20):
        output = random_output(Random(seed), dialect)
        whole = parsed(dialect, [output.text])
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
        tokens = [detokenizer.push([token]) for token in tokenizer.encode_parts([output.text])[0]]
        assert "".join([*tokens, detokenizer.finish()]) == output.text
        assert parsed(dialect, tokens) == whole
        assert parsed(dialect, list(output.text)) == whole


def test_30_parallel_calls_are_read() -> None:
    for dialect in DIALECTS:
        output = next(
            one for seed in range(10_000) if len((one := random_output(Random(seed), dialect, 40)).calls) >= 30
        )
        assert read(parsed(dialect, [output.text]))[2] == output.calls
