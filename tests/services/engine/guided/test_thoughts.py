"""Constraints begin behind thoughts, whose tokens may be limited."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import tokenizers

from engine.constraint import ConstraintState
from engine.errors import ConstraintFailed, InvalidRequest
from quire.v1 import decoding_pb2
from services.engine.guided.grammar_sources import GrammarSpec
from services.engine.guided.grammars import CompiledGrammar, Vocabulary
from services.engine.guided.mark_tokens import MarkTokens
from services.engine.guided.thoughts import ThoughtConstraint
from tests.tiny_models import VOCABULARY

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
END = 0


@pytest.fixture(scope="module")
def tiny(tiny_model: Callable[[str], Path]) -> Vocabulary:
    return Vocabulary(tiny_model("llama"), VOCABULARY, [END])


@pytest.fixture(scope="module")
def tokens(tiny: Vocabulary) -> MarkTokens:
    return MarkTokens(tiny)


@pytest.fixture(scope="module")
def answer(tiny: Vocabulary) -> CompiledGrammar:
    return CompiledGrammar(tiny, GrammarSpec("json_schema", json.dumps(SCHEMA)))


def thought(begin: str = "", end: str = "</think>", **limits: int) -> decoding_pb2.Thought:
    return decoding_pb2.Thought(begin=begin, end=end, **limits)


def written(tokens: MarkTokens, state: ConstraintState, text: str) -> ConstraintState:
    """Advance over a text, and check that each token is allowed."""
    for token in tokens.mark(text).ids:
        assert int.from_bytes(state.allowed(), "little") >> token & 1, (text, token)
        state.advance(token)
    return state


def allows(tokens: MarkTokens, state: ConstraintState, text: str) -> bool:
    return bool(int.from_bytes(state.allowed(), "little") >> tokens.mark(text).ids[0] & 1)


@pytest.mark.parametrize("gap", ["", "\n", "\n\n"])
def test_the_constraint_begins_behind_the_thought(tokens: MarkTokens, answer: CompiledGrammar, gap: str) -> None:
    state = ThoughtConstraint(tokens, thought(), answer).start()
    written(tokens, state, 'I "see" {.</think>' + gap)
    assert not allows(tokens, state, "x")
    assert not state.complete
    written(tokens, state, '{"a": 1}')
    state.allowed()
    assert state.complete or allows(tokens, state, "")


def test_an_output_may_begin_with_a_thought_or_the_answer(tokens: MarkTokens, answer: CompiledGrammar) -> None:
    constraint = ThoughtConstraint(tokens, thought("<think>"), answer)
    written(tokens, written(tokens, constraint.start(), "<think>x</think>"), '{"a": 2}')
    written(tokens, constraint.start(), '{"a": 2}')
    assert not allows(tokens, constraint.start(), "x")


def test_a_thought_cannot_end_the_output_before_the_answer(tokens: MarkTokens, answer: CompiledGrammar) -> None:
    state = ThoughtConstraint(tokens, thought(), answer).start()
    assert not int.from_bytes(state.allowed(), "little") >> END & 1
    with pytest.raises(ConstraintFailed, match="ended in its thought"):
        state.advance(END)


@pytest.mark.parametrize("most", [0, 1, 5])
def test_a_thought_that_has_used_up_its_tokens_is_ended(tokens: MarkTokens, answer: CompiledGrammar, most: int) -> None:
    state = ThoughtConstraint(tokens, thought(max_tokens=most), answer).start()
    for _ in range(most):
        state.advance(tokens.mark("x").ids[0])
    assert not allows(tokens, state, "x")
    written(tokens, written(tokens, state, "</think>"), '{"a": 1}')


def test_without_tokens_for_it_no_thought_begins(tokens: MarkTokens, answer: CompiledGrammar) -> None:
    state = ThoughtConstraint(tokens, thought("<think>", max_tokens=0), answer).start()
    assert not allows(tokens, state, "<think>")


@pytest.mark.parametrize("most", [0, 3])
@pytest.mark.parametrize("text", ["<b>hi</b>", "<tool_response>", "<thin ice", "<", "<think", "no"])
def test_an_answer_may_begin_like_the_mark(tokens: MarkTokens, text: str, most: int) -> None:
    state = ThoughtConstraint(tokens, thought("<think>", max_tokens=most)).start()
    written(tokens, state, text)
    assert allows(tokens, state, "x")


@pytest.mark.parametrize("blank", ["\n", " ", "\n\n"])
def test_a_thought_may_stand_behind_whitespace(tokens: MarkTokens, blank: str) -> None:
    state = ThoughtConstraint(tokens, thought("<think>", max_tokens=1)).start()
    written(tokens, state, f"{blank}<think>x")
    assert not allows(tokens, state, "x")


def test_a_constrained_answer_may_begin_like_the_mark(tiny: Vocabulary, tokens: MarkTokens) -> None:
    answer = CompiledGrammar(tiny, GrammarSpec("regex", "<tool>[ab]"))
    constraint = ThoughtConstraint(tokens, thought("<think>"), answer)
    written(tokens, constraint.start(), "<tool>a")
    written(tokens, constraint.start(), "<think>no</think><tool>b")
    assert not allows(tokens, written(tokens, constraint.start(), "<t"), "x")


def test_a_limit_needs_no_constraint(tokens: MarkTokens) -> None:
    state = ThoughtConstraint(tokens, thought("<think>", max_tokens=2)).start()
    written(tokens, state, "<think>")
    for _ in range(2):
        state.advance(tokens.mark("x").ids[0])
    written(tokens, written(tokens, state, "</think>"), "anything at all <think> x x x x")
    assert not state.complete


def test_no_token_goes_on_behind_the_mark(tokens: MarkTokens) -> None:
    crossing = [token for token in range(VOCABULARY) if b"e" in tokens.text(token)[:-1]]
    state = ThoughtConstraint(tokens, thought(end="e")).start()
    allowed = int.from_bytes(state.allowed(), "little")
    assert not any(allowed >> token & 1 for token in crossing)
    assert allows(tokens, state, "e")


def test_a_thought_needs_an_end_mark(tokens: MarkTokens) -> None:
    with pytest.raises(InvalidRequest, match=r"thought.end must not be empty"):
        ThoughtConstraint(tokens, thought(end=""))


@pytest.mark.parametrize("begin", ["", "<think>"])
def test_random_outputs_are_a_thought_and_an_answer_and_can_be_resumed_anywhere(
    tokens: MarkTokens, answer: CompiledGrammar, begin: str
) -> None:
    constraint = ThoughtConstraint(tokens, thought(begin, max_tokens=12), answer)
    for seed in range(30):
        draw, state, ids = Random(seed), constraint.start(), list[int]()
        while not state.complete:
            mask = int.from_bytes(state.allowed(), "little")
            choices = [token for token in range(VOCABULARY) if mask >> token & 1]
            token = draw.choice(choices)
            if token == END:
                break
            again = constraint.start()
            for one in ids:
                again.advance(one)
            assert again.allowed() == state.allowed()
            assert state.copy().allowed() == state.allowed()
            state.advance(token)
            ids.append(token)
            assert len(ids) < 100
        text = b"".join(map(tokens.text, ids)).decode(errors="replace")
        before, _, after = text.rpartition("</think>")
        assert json.loads(after) in ({"a": 1}, {"a": 2})
        assert bool(before or "</think>" in text) == (not begin or text.startswith(begin))


@pytest.fixture(scope="module")
def marked(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> MarkTokens:
    """The tokens of a model whose marks are tokens of their own."""
    folder = tmp_path_factory.mktemp("marked")
    shutil.copytree(tiny_model("llama"), folder, dirs_exist_ok=True)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens([tokenizers.AddedToken("<think>"), tokenizers.AddedToken("</think>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    return MarkTokens(Vocabulary(folder, backend.get_vocab_size(), [END]))


@pytest.mark.parametrize("most", [0, 2, None])
def test_marks_may_be_tokens_of_their_own(marked: MarkTokens, most: int | None) -> None:
    [begin], [end] = marked.mark("<think>").ids, marked.mark("</think>").ids
    limits = {} if most is None else {"max_tokens": most}
    state = ThoughtConstraint(marked, thought("<think>", **limits)).start()
    allowed = int.from_bytes(state.allowed(), "little")
    assert allowed >> marked.mark("x").ids[0] & 1
    assert bool(allowed >> begin & 1) == (most != 0)
    if most == 0:
        return
    state.advance(begin)
    for token in marked.mark("</think>x").ids[:2]:
        assert int.from_bytes(state.allowed(), "little") >> token & 1
        state.advance(token)
    allowed = int.from_bytes(state.allowed(), "little")
    assert allowed == 1 << end if most else allowed >> end & 1
    state.advance(end)
    written(marked, state, "\nany text")
