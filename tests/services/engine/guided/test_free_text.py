"""Calls of tools in free text follow a grammar from their opening mark on."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.constraint import ConstraintState
from engine.errors import ConstraintFailed
from quire.v1 import decoding_pb2
from services.engine.guided.free_text import CallsOrTextConstraint, FreeTextConstraint
from services.engine.guided.grammar_sources import GrammarSpec, InvalidGrammar
from services.engine.guided.grammars import CompiledGrammar, Vocabulary
from services.engine.guided.mark_tokens import MarkTokens
from services.engine.guided.tool_calls import CallableTools, source_of, tools_of
from tests.tiny_models import VOCABULARY

END = 0
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
CALL = '<call>f{"a": 1}</call>'


@pytest.fixture(scope="module")
def tiny(tiny_model: Callable[[str], Path]) -> Vocabulary:
    return Vocabulary(tiny_model("llama"), VOCABULARY, [END])


def compiled(vocabulary: Vocabulary, begin: str, end: str, mark: str) -> tuple[CompiledGrammar, CallableTools]:
    calls = decoding_pb2.ToolCallGrammar(max_calls=2, separator=";", mark=mark)
    calls.tools.add(name="f", parameters=json.dumps(SCHEMA), begin=begin, end=end)
    source = source_of(calls)
    return CompiledGrammar(vocabulary, GrammarSpec("tool_calls", source)), tools_of(source)


def in_text(vocabulary: Vocabulary, begin: str, end: str, mark: str) -> ConstraintState:
    grammar, _ = compiled(vocabulary, begin, end, mark)
    return FreeTextConstraint(MarkTokens(vocabulary), mark, grammar).start()


def calls_or_text(vocabulary: Vocabulary, begin: str, end: str, mark: str) -> ConstraintState:
    grammar, tools = compiled(vocabulary, begin, end, mark)
    return CallsOrTextConstraint(MarkTokens(vocabulary), tools.beginnings, grammar).start()


def single(vocabulary: Vocabulary, byte: str) -> int:
    """Return the token of one byte."""
    [token] = vocabulary.tokens.tokenize_str(byte)
    return token


def allows(state: ConstraintState, token: int) -> bool:
    return bool(int.from_bytes(state.allowed(), "little") >> token & 1)


def written(vocabulary: Vocabulary, state: ConstraintState, text: str) -> ConstraintState:
    """Advance over a text by the shortest tokens that are allowed; text that a grammar forces has one token."""
    rest = text.encode()
    while rest:
        beginnings = (vocabulary.tokens.tokenize_bytes(rest[:length]) for length in range(1, len(rest) + 1))
        token = next((tokens[0] for tokens in beginnings if len(tokens) == 1 and allows(state, tokens[0])), None)
        assert token is not None, (text, rest)
        state.advance(token)
        rest = rest[len(vocabulary.tokens.decode_bytes([token])) :]
    return state


def follows(vocabulary: Vocabulary, before: ConstraintState, text: str) -> bool:
    state = before.copy()
    try:
        written(vocabulary, state, text)
    except (AssertionError, ConstraintFailed):
        return False
    return True


@pytest.fixture
def state(tiny: Vocabulary) -> ConstraintState:
    return in_text(tiny, "<call>f", "</call>", "<call>")


@pytest.mark.parametrize("text", ["", "Well, {1 < 2", "<call", "<calls>", "<<ca<call"])
def test_text_is_free_and_may_end_at_any_place(tiny: Vocabulary, state: ConstraintState, text: str) -> None:
    written(tiny, state, text)
    assert allows(state, END)
    assert not state.complete


def test_from_the_mark_on_calls_follow_the_grammar(tiny: Vocabulary, state: ConstraintState) -> None:
    written(tiny, state, "Well: <<call>")
    assert not allows(state, END)
    assert not follows(tiny, state, "g")
    assert not follows(tiny, state, 'f{"a": 3')
    assert follows(tiny, state, 'f{"a": 1}</call>')


def test_text_and_further_calls_may_follow_calls(tiny: Vocabulary, state: ConstraintState) -> None:
    written(tiny, state, f"{CALL} and {CALL}")
    assert allows(state, END)
    written(tiny, state, f"{CALL}{CALL}.<call>f")
    assert not follows(tiny, state, "x")


def test_no_token_goes_on_behind_the_mark(tiny: Vocabulary) -> None:
    longer = next(token for token in range(1, VOCABULARY) if len(set(tiny.tokens.decode_bytes([token]))) > 1)
    text = tiny.tokens.decode_str([longer])
    state = in_text(tiny, text[:1], "</call>", text[:1])
    assert not allows(state, longer)
    assert allows(state, single(tiny, text[:1]))


def test_a_mark_that_is_a_token_begins_calls_as_that_token_alone(tiny: Vocabulary) -> None:
    name, token = next((name, at) for name, at in tiny.marks.items() if at > END)
    state = in_text(tiny, f"{name}f", name, name)
    written(tiny, state, f"{name}x")  # spelled
    assert allows(state, token)
    state.advance(token)
    assert not allows(state, END)
    written(tiny, state, 'f{"a": 2}')
    state.advance(token)
    assert allows(state, END)
    assert follows(tiny, state, "text")


@pytest.mark.parametrize("text", ["x[f(1)", "[1, 2]", "[fg(1)", "[f", '{"f": 1}', ""])
def test_text_that_does_not_begin_with_a_call_is_free(tiny: Vocabulary, text: str) -> None:
    state = written(tiny, calls_or_text(tiny, "[f(", ")]", "["), text)
    assert allows(state, END)
    assert follows(tiny, state, " and")


@pytest.mark.parametrize("beginning", ["[f(", " \n[f(", "[ f\n("])
def test_an_output_that_begins_with_the_name_of_a_tool_is_calls(tiny: Vocabulary, beginning: str) -> None:
    state = written(tiny, calls_or_text(tiny, "[f(", ")]", "["), beginning)
    assert not allows(state, END)
    assert not follows(tiny, state, "1")
    written(tiny, state, '{"a": 1})]')
    assert allows(state, END)
    assert follows(tiny, state, ';[f({"a": 2})]')
    assert not follows(tiny, state, " and")


def test_special_tokens_may_stand_in_front_of_calls(tiny: Vocabulary) -> None:
    state = calls_or_text(tiny, '{"name": "f", "parameters": ', "}", '{"name": "')
    state.advance(next(at for at in tiny.marks.values() if at > END))
    written(tiny, state, '{"name":"f')
    assert not follows(tiny, state, 'oo"')
    assert not follows(tiny, state, '", "x')
    assert follows(tiny, state, '", "parameters": {"a": 1}}')


@pytest.mark.parametrize(
    ("names", "beginnings"),
    [(["f", "g"], ['{"name": "f', '{"name": "g']), (["f", "fg"], ['{"name": "f"', '{"name": "fg'])],
)
def test_calls_begin_with_a_name_that_no_other_one_goes_on(names: list[str], beginnings: list[str]) -> None:
    calls = decoding_pb2.ToolCallGrammar(mark="{", mark_only_at_start=True)
    for name in names:
        calls.tools.add(name=name, parameters="{}", begin=f'{{"name": "{name}", "parameters": ', end="}")
    assert tools_of(source_of(calls)).beginnings == beginnings


def test_no_token_goes_on_behind_the_beginning_of_calls(tiny: Vocabulary) -> None:
    longer = next(token for token in range(1, VOCABULARY) if len(set(tiny.tokens.decode_bytes([token]).strip())) > 1)
    text = tiny.tokens.decode_str([longer]).strip()
    grammar, _ = compiled(tiny, text[:1] + "f", "", text[:1])
    state = CallsOrTextConstraint(MarkTokens(tiny), [text[:1]], grammar).start()
    assert not allows(state, longer)
    assert allows(state, single(tiny, text[:1]))


def test_a_copy_goes_its_own_way(tiny: Vocabulary, state: ConstraintState) -> None:
    written(tiny, state, "<call>f")
    copy = state.copy()
    written(tiny, state, '{"a": 1}</call> text')
    assert not follows(tiny, copy, " text")
    assert follows(tiny, copy, '{"a": 2}</call> text')


@pytest.mark.parametrize("mark", ["<other>", "<call>f and more"])
def test_a_mark_that_does_not_begin_calls_is_refused(tiny: Vocabulary, mark: str) -> None:
    with pytest.raises(InvalidGrammar, match="mark must be the beginning of calls"):
        in_text(tiny, "<call>f", "</call>", mark)
