"""Calls that a grammar holds a model to, in every form: read by the gateway's parser, and judged by `jsonschema`."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.constraint import ConstraintState
from quire.v1 import decoding_pb2, gateway_pb2
from services.engine.guided.free_text import CallsOrTextConstraint, FreeTextConstraint
from services.engine.guided.grammar_sources import GrammarSpec, InvalidGrammar
from services.engine.guided.grammars import CompiledGrammar, Vocabulary
from services.engine.guided.mark_tokens import MarkTokens
from services.engine.guided.tool_calls import source_of, tools_of
from services.gateway.dialects.declarations import CALL_FORMATS, PLAIN_JSON
from services.gateway.dialects.dialect import CallFormat, Dialect
from services.gateway.dialects.events import merged
from services.gateway.dialects.guided_arguments import can_be_guided
from services.gateway.dialects.offered_tools import OfferedTools
from services.gateway.dialects.parser import DialectParser
from services.gateway.text.tool_choice import call_grammar, in_text
from tests.dialect_outputs import read
from tests.services.engine.guided.test_valid_answers import END, SCHEMAS, SIZE, Walker, exactly, validator_of

WALKS = 2
ONE_BY_ONE = [calls for calls in CALL_FORMATS if calls.form.argument_texts]


@pytest.fixture(scope="module")
def walker(demo_model: Path) -> Walker:
    return Walker(Vocabulary(demo_model, SIZE, [END]), ending=b'"}]<\n)', most_tokens=300)


def compiled(walker: Walker, calls: CallFormat, schema: Any) -> CompiledGrammar:
    tool = gateway_pb2.Tool(name="act", parameters=json.dumps(schema))
    source = source_of(call_grammar([tool], calls, parallel=True))
    return CompiledGrammar(walker.vocabulary, GrammarSpec("tool_calls", source))


def refusal_of(walker: Walker, calls: CallFormat, schema: Any) -> str:
    try:
        compiled(walker, calls, schema)
    except InvalidGrammar as refusal:
        return str(refusal)
    return ""


def check_walks(walker: Walker, calls: CallFormat, schema: Any, seed: int) -> int:
    """Check the calls of some walks; return how many walks ended."""
    grammar, source = compiled(walker, calls, schema), random.Random(seed)
    answers = [text for _ in range(WALKS) if (text := walker.answer(grammar, source)) is not None]
    check_answers(answers, calls, schema, is_held=True)
    return len(answers)


def check_answers(answers: list[str], calls: CallFormat, schema: Any, *, is_held: bool) -> None:
    """Check that each answer is calls whose arguments are valid."""
    tools, validator = OfferedTools({"act": schema}), validator_of(schema)
    for text in answers:
        parser = DialectParser(Dialect(None, calls), tools, is_constrained=is_held, is_held=is_held)
        _, answer, found = read(merged([*parser.push(text), *parser.finish()]))
        assert (answer, bool(found), dict(parser.failures)) == ("", True, {}), text
        for name, arguments in found:
            assert name == "act"
            value = exactly(json.dumps(arguments))
            assert validator.is_valid(value), f"{text!r} under {schema}: {next(validator.iter_errors(value))}"


NAMES = st.sampled_from(["a", "b", "key", "x_1", "foo", "ü", "a-b", "type"])
TOOLS = st.fixed_dictionaries(
    {
        "type": st.just("object"),
        "properties": st.dictionaries(NAMES, SCHEMAS, min_size=1, max_size=3),
        "$defs": st.fixed_dictionaries({"d": SCHEMAS, "e": SCHEMAS}),
    },
    optional={"additionalProperties": st.sampled_from([True, False, {"type": "string"}])},
).map(lambda schema: schema | {"required": list(schema["properties"])[:2]})


@pytest.mark.parametrize("calls", ONE_BY_ONE, ids=lambda calls: calls.name)
@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(schema=TOOLS, seed=st.integers(0, 2**32))
def test_calls_whose_arguments_stand_one_by_one_are_valid_under_drawn_schemas(
    walker: Walker, calls: CallFormat, schema: Any, seed: int
) -> None:
    if not can_be_guided(calls.form.argument_texts, schema):
        return
    if refusal := refusal_of(walker, calls, schema):
        assert refusal_of(walker, PLAIN_JSON, schema), refusal
    else:
        check_walks(walker, calls, schema, seed)


SIMPLE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "maxLength": 8},
        "size": {"type": "integer"},
        "note": {"type": ["string", "null"], "maxLength": 3},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "maxItems": 2},
    },
    "required": ["text"],
}


@pytest.mark.parametrize("calls", CALL_FORMATS, ids=lambda calls: calls.name)
def test_calls_of_every_form_end_and_are_valid(walker: Walker, calls: CallFormat) -> None:
    assert sum(check_walks(walker, calls, SIMPLE, seed) for seed in range(5)) > 2


def begun(walker: Walker, grammar: decoding_pb2.ToolCallGrammar) -> tuple[ConstraintState, str]:
    """Return the state behind the beginning of calls in text, and that beginning."""
    source = source_of(grammar)
    held, tokens = CompiledGrammar(walker.vocabulary, GrammarSpec("tool_calls", source)), MarkTokens(walker.vocabulary)
    if grammar.mark_only_at_start:
        [beginning] = tools_of(source).beginnings
        state = CallsOrTextConstraint(tokens, [beginning], held).start()
    else:
        constraint = FreeTextConstraint(tokens, grammar.mark, held)
        state, beginning = constraint.start(), constraint.mark.text.decode()
    for token in tokens.spelled(beginning.encode()):
        assert state.allowed()[token // 8] >> token % 8 & 1
        state.advance(token)
    return state, beginning


@pytest.mark.parametrize("calls", CALL_FORMATS, ids=lambda calls: calls.name)
def test_calls_in_text_are_valid_in_every_form(walker: Walker, calls: CallFormat) -> None:
    tool = gateway_pb2.Tool(name="act", parameters=json.dumps(SIMPLE))
    grammar = in_text(call_grammar([tool], calls, parallel=True), calls, set())
    assert grammar
    state, beginning = begun(walker, grammar)
    source = random.Random(0)
    rests = [walker.calls_from(state.copy(), source) for _ in range(8)]
    answers = [beginning + rest for rest in rests if rest is not None]
    assert len(answers) > 2
    check_answers(answers, calls, SIMPLE, is_held=False)


def string(**keywords: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"s": {"type": "string"} | keywords}, "required": ["s"]}


LONG = [
    string(minLength=10, maxLength=200),
    string(minLength=60, maxLength=90),
    string(minLength=1, maxLength=100),
    string(minLength=60),
    string(minLength=60, maxLength=90, pattern="^[<>/a-z_ =\"']*$"),
    string(pattern=r"\.py$", maxLength=200),
    string(pattern=r"\S", maxLength=300),
    string(pattern="^.*a.{12}$"),
    string(type=["string", "null"], maxLength=5000),
    string(type=["string", "null"], minLength=1, maxLength=10_000),
    {"type": "object", "properties": {f"p{at}": {"type": "integer"} for at in range(60)}},
    {"type": "object", "properties": {f"p{at}": {"type": ["string", "null"]} for at in range(200)}},
]


@pytest.mark.parametrize("calls", [one for one in ONE_BY_ONE if one.name in ("glm", "minimax-m2", "functiongemma")])
@pytest.mark.parametrize("schema", LONG, ids=lambda schema: json.dumps(schema)[30:90])
def test_long_strings_and_many_arguments_do_not_exhaust_the_grammar(
    walker: Walker, calls: CallFormat, schema: Any
) -> None:
    check_walks(walker, calls, schema, seed=0)
