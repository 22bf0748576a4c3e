"""The grammar of tool calls."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConstraintFailed
from quire.v1 import decoding_pb2
from services.engine.guided.grammar_sources import GrammarSpec, InvalidGrammar
from services.engine.guided.grammars import CompiledGrammar, Vocabulary
from services.engine.guided.tool_calls import END_OF_SEQUENCE, source_of, tool_call_grammar, tools_of
from tests.tiny_models import VOCABULARY

DIGIT = {"type": "object", "properties": {"a": {"$ref": "#/$defs/digit"}}, "required": ["a"]}
DIGIT |= {"additionalProperties": False, "$defs": {"digit": {"enum": [1, 2]}}}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}


@pytest.fixture(scope="module")
def tiny(tiny_model: Callable[[str], Path]) -> Vocabulary:
    return Vocabulary(tiny_model("llama"), VOCABULARY, [0])


def grammar(vocabulary: Vocabulary, tools: dict[str, Any], max_calls: int) -> CompiledGrammar:
    calls = decoding_pb2.ToolCallGrammar(max_calls=max_calls)
    for name, schema in tools.items():
        calls.tools.add(name=name, parameters=json.dumps(schema))
    return CompiledGrammar(vocabulary, GrammarSpec("tool_calls", source_of(calls)))


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments}}}\n</tool_call>'


def matches(vocabulary: Vocabulary, compiled: CompiledGrammar, text: str) -> bool:
    """Return True if the text is a complete output."""
    state = compiled.start()
    try:
        for token in vocabulary.tokens.tokenize_str(text):
            state.advance(token)
        return state.complete or bool(state.allowed()[0] & 1)  # token 0 ends an output
    except ConstraintFailed:
        return False


@pytest.mark.parametrize(
    ("text", "matched"),
    [
        (call("add", '{"a": 1}'), True),
        (call('say "ü"', "{}"), True),
        ("\n".join([call("add", '{"a": 2}'), call('say "ü"', "{}")]), True),
        ("\n".join([call('say "ü"', "{}")] * 3), False),
        (call("add", '{"a": 3}'), False),
        (call("add", "{}"), False),
        (call("other", "{}"), False),
        (call("add", '{"a": 1}')[:-1], False),
        ("Well: " + call("add", '{"a": 1}'), False),
        ("", False),
    ],
)
def test_an_output_is_calls_whose_arguments_follow_the_schema_of_their_tool(
    tiny: Vocabulary, text: str, matched: bool
) -> None:
    compiled = grammar(tiny, {"add": DIGIT, 'say "ü"': NOTHING}, max_calls=2)
    assert matches(tiny, compiled, text) == matched


def test_arguments_are_an_object_where_the_schema_leaves_it_open(tiny: Vocabulary) -> None:
    compiled = grammar(tiny, {"now": {}}, max_calls=1)
    assert matches(tiny, compiled, call("now", '{"a": 1}'))
    assert not matches(tiny, compiled, call("now", "[1]"))


def test_an_output_of_one_call_at_most_ends_with_it(tiny: Vocabulary) -> None:
    state = grammar(tiny, {"now": NOTHING}, max_calls=1).start()
    for token in tiny.tokens.tokenize_str(call("now", "{}")):
        assert not state.complete
        state.advance(token)
    assert state.complete


OWN = {"section_begin": "<|calls|>", "section_end": "<|/calls|>", "separator": "; ", "after_number": "<|args|>"}


@pytest.mark.parametrize(
    ("text", "matched"),
    [
        ('<|calls|>call add:0<|args|>{"a": 1}!<|/calls|>', True),
        ('<|calls|>call add:0<|args|>{"a": 1}!; call add:12<|args|>{"a": 2}!<|/calls|>', True),
        ('<|calls|>call add:<|args|>{"a": 1}!<|/calls|>', False),
        ('<|calls|>call add:0<|args|>{"a": 3}!<|/calls|>', False),
        ('<|calls|>call add:0<|args|>{"a": 1}!', False),
        (call("add", '{"a": 1}'), False),
    ],
)
def test_calls_have_the_texts_of_the_grammar(tiny: Vocabulary, text: str, matched: bool) -> None:
    calls = decoding_pb2.ToolCallGrammar(max_calls=2, **OWN)
    calls.tools.add(name="add", parameters=json.dumps(DIGIT), begin="call add:", end="!")
    compiled = CompiledGrammar(tiny, GrammarSpec("tool_calls", source_of(calls)))
    assert matches(tiny, compiled, text) == matched


@pytest.mark.parametrize(
    ("text", "matched"),
    [
        (call("add", '{"a": 1}'), True),
        ('{"b": true}', True),
        ('{"b": 1}', False),
        ("", False),
        (call("add", "{}"), False),
    ],
)
def test_an_answer_may_take_the_place_of_calls(tiny: Vocabulary, text: str, matched: bool) -> None:
    answer = {
        "type": "object",
        "properties": {"b": {"type": "boolean"}},
        "required": ["b"],
        "additionalProperties": False,
    }
    calls = decoding_pb2.ToolCallGrammar(answer=json.dumps(answer))
    calls.tools.add(name="add", parameters=json.dumps(DIGIT))
    compiled = CompiledGrammar(tiny, GrammarSpec("tool_calls", source_of(calls)))
    assert matches(tiny, compiled, text) == matched


def test_a_fault_of_the_answer_is_named(tiny: Vocabulary) -> None:
    calls = decoding_pb2.ToolCallGrammar(answer='{"properties": {"a": {"format": "x"}}}')
    calls.tools.add(name="add", parameters=json.dumps(DIGIT))
    with pytest.raises(InvalidGrammar, match=r'^answer: #/properties/a/format: the format "x" is not supported$'):
        CompiledGrammar(tiny, GrammarSpec("tool_calls", source_of(calls)))


def test_texts_that_name_tokens_are_these_tokens() -> None:
    calls = decoding_pb2.ToolCallGrammar(section_begin="<|a|>x<|b|>", section_end="<|end|>")
    calls.tools.add(name="f", parameters="{}", begin="f<|b|>", end=".")
    tools = tools_of(source_of(calls))
    grammar = tool_call_grammar(tools, [{}], {}, {"<|a|>": 7, "<|b|>": 8, "<|end|>": END_OF_SEQUENCE})
    assert 'start: <[7]> "x" <[8]> call ""' in grammar
    assert 'call_0: "f" <[8]> arguments_0 "."' in grammar


@pytest.mark.parametrize(
    ("tools", "max_calls", "fault"),
    [
        ({}, 1, "at least one tool"),
        ({"now": NOTHING}, 17, "max_calls between 1 and 16"),
        ({"now": NOTHING, "add": {"type": "thing"}}, 1, r"\[1\].parameters: #/type must be one or several"),
        (
            {"now": NOTHING, "add": {"properties": {"a": {"format": "x"}}}},
            1,
            r'^tools\[1\].parameters: #/properties/a/format: the format "x" is not supported$',
        ),
    ],
)
def test_an_invalid_grammar_is_refused_with_the_tool(
    tiny: Vocabulary, tools: dict[str, Any], max_calls: int, fault: str
) -> None:
    with pytest.raises(InvalidGrammar, match=fault):
        grammar(tiny, tools, max_calls)
