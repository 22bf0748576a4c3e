"""Calls whose arguments stand between tags."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.v1 import decoding_pb2
from services.engine.guided.grammar_sources import GrammarSpec, InvalidGrammar
from services.engine.guided.grammars import CompiledGrammar, Vocabulary
from services.engine.guided.tool_calls import source_of
from tests.services.engine.guided.test_tool_calls import matches
from tests.tiny_models import VOCABULARY

BETWEEN_TAGS = {
    "before_key": "\n<parameter=",
    "before_text": ">\n",
    "after_text": "\n</parameter>",
    "before_value": ">\n",
    "after_value": "\n</parameter>",
}
TYPED = BETWEEN_TAGS | {"before_text": ' string="true">\n', "before_value": ' string="false">\n'}
AS_IN_PYTHON = {"before_value": "=", "separator": ", "}
IN_QUOTES = {"before_text": ":<q>", "after_text": "<q>", "before_value": ":", "separator": ","}
ANY_CITY: dict[str, Any] = {"city": {"type": "string"}}


@pytest.fixture(scope="module")
def tiny(tiny_model: Callable[[str], Path]) -> Vocabulary:
    return Vocabulary(tiny_model("llama"), VOCABULARY, [0])


def grammar(vocabulary: Vocabulary, texts: dict[str, str], schema: dict[str, Any], answer: str = "") -> CompiledGrammar:
    calls = decoding_pb2.ToolCallGrammar(argument_texts=decoding_pb2.ArgumentTexts(**texts), answer=answer)
    calls.tools.add(name="f", parameters=json.dumps({"type": "object"} | schema), begin="<f>", end="</f>")
    return CompiledGrammar(vocabulary, GrammarSpec("tool_calls", source_of(calls)))


def tagged(**arguments: str) -> str:
    return "<f>" + "".join(f"\n<parameter={key}>\n{text}\n</parameter>" for key, text in arguments.items()) + "</f>"


@pytest.mark.parametrize("text", ["", "Oslo", "a\nb", "\n", ' "x" ', "5", "null", "a < b </p", "</parameter", "ü\\n"])
def test_a_string_between_tags_is_any_text_without_the_mark_that_ends_it(tiny: Vocabulary, text: str) -> None:
    assert matches(tiny, grammar(tiny, BETWEEN_TAGS, {"properties": ANY_CITY}), tagged(city=text))


def test_a_string_between_tags_cannot_have_the_mark_that_ends_it(tiny: Vocabulary) -> None:
    compiled = grammar(tiny, BETWEEN_TAGS, {"properties": ANY_CITY})
    assert not matches(tiny, compiled, tagged(city="a</parameter>b"))


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "integer"}, ["5", "-12"], ["x", '"5"', "5.5", ""]),
        ({"type": "integer", "minimum": 3}, ["3", "77"], ["2", "-5"]),
        ({"type": "boolean"}, ["true", "false"], ["True", "yes"]),
        ({"type": "array", "items": {"type": "string"}}, ["[]", '["a", "<b>"]'], ["a", "[1]"]),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, ['{"a": 1, "b": 2}'], ['{"a": "x"}', "a"]),
        ({"enum": ["a", "b b"]}, ["a", "b b"], ["c", "", '"a"']),
        ({"enum": ["a", 1, None]}, ["a", "1", "null"], ['"a"', "2"]),
        ({"const": "x"}, ["x"], ["y"]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "abc", "5\n6"], ["a", "abcd"]),
        ({"type": "string", "pattern": "^[a-c]+$"}, ["abc"], ["abd", ""]),
        ({"type": "string", "pattern": "b|^x$"}, ["abc", "b", "x"], ["xx", "a"]),
        ({"type": "string", "pattern": "(^a|b)"}, ["a", "ax", "xb"], ["xa", ""]),
        ({"type": "string", "pattern": r"^(a)\($|^[)(|]+$"}, ["a(", "(|)"], ["a", "a("[:1]]),
        ({"type": "string", "pattern": r"^a/\d$", "maxLength": 4}, ["a/5"], ["a/x"]),
        ({"type": "string", "format": "date"}, ["2026-11-29"], ["2026-13-01", "today"]),
        ({"type": "string", "format": "uuid"}, ["123e4567-e89b-12d3-a456-426614174000"], ["123"]),
        ({"type": ["string", "null"]}, ["Oslo", "null", "nullify", ""], ["5", "None", '"x"', "[a]", " true"]),
        ({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 3}]}, ["abc", "4", "x 2"], ["2", "'a'", "4 x"]),
        ({}, ["abc", "4", '{"a": 1}', "[]", "true"], ['"x"', "True", "{a}", "5x", "# 5", "u'x'"]),
        (True, ["abc", "4"], ['"x"']),
        ({"$ref": "#/$defs/colour"}, ["red"], ["blue"]),
        ({"anyOf": [{"$ref": "#/$defs/colour"}, {"$ref": "#/$defs/tree"}]}, ["red", '{"a": {"a": {}}}'], ["x", "5"]),
        ({"type": "array", "items": {"$ref": "#/$defs/tree"}}, ['[{"a": {}}]'], ["[5]"]),
        ({"oneOf": [{"const": "a"}, {"const": "b"}, {"type": "null"}]}, ["a", "b", "null"], ["c"]),
        ({"allOf": [{"type": "string"}, {"maxLength": 2}]}, ["ab"], ["abc"]),
    ],
)
def test_a_value_between_tags_follows_its_schema(
    tiny: Vocabulary, schema: Any, right: list[str], wrong: list[str]
) -> None:
    tree = {"type": "object", "properties": {"a": {"$ref": "#/$defs/tree"}}, "additionalProperties": False}
    definitions = {"colour": {"enum": ["red", "green"]}, "tree": tree}
    compiled = grammar(tiny, BETWEEN_TAGS, {"properties": {"a": schema}, "required": ["a"], "$defs": definitions})
    assert [text for text in right if not matches(tiny, compiled, tagged(a=text))] == []
    assert [text for text in wrong if matches(tiny, compiled, tagged(a=text))] == []


def test_arguments_stand_in_the_order_of_the_schema_and_only_required_ones_must(tiny: Vocabulary) -> None:
    schema = {
        "properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "null"}},
        "required": ["b"],
    }
    compiled = grammar(tiny, BETWEEN_TAGS, schema)
    taken = [{"a": "1", "b": "x", "c": "null"}, {"b": "x"}, {"a": "1", "b": ""}, {"b": "x", "c": "null"}]
    refused: list[dict[str, str]] = [{}, {"a": "1"}, {"b": "x", "a": "1"}, {"b": "x", "d": "x"}]
    assert all(matches(tiny, compiled, tagged(**one)) for one in taken)
    assert not any(matches(tiny, compiled, tagged(**one)) for one in refused)


@pytest.mark.parametrize(("text", "matched"), [("<f></f>", True), ("<f>\n</f>", False)])
def test_a_call_may_have_no_arguments(tiny: Vocabulary, text: str, matched: bool) -> None:
    assert matches(tiny, grammar(tiny, BETWEEN_TAGS, {"properties": ANY_CITY}), text) == matched
    assert matches(tiny, grammar(tiny, BETWEEN_TAGS, {"properties": {}}), text) == matched


def test_a_value_of_which_the_tags_say_whether_it_is_a_string_may_look_like_another(tiny: Vocabulary) -> None:
    compiled = grammar(tiny, TYPED, {"properties": {"a": {"type": ["string", "integer"]}}})

    def call(text: str, is_string: str) -> str:
        return f'<f>\n<parameter=a string="{is_string}">\n{text}\n</parameter></f>'

    assert matches(tiny, compiled, call("5", "true"))
    assert matches(tiny, compiled, call("5", "false"))
    assert not matches(tiny, compiled, call("x", "false"))


def test_arguments_as_in_python_have_strings_in_json(tiny: Vocabulary) -> None:
    properties = {"a": {"type": "string"}, "b": {"type": ["integer", "null"]}, "c": {"type": "string"}}
    compiled = grammar(tiny, AS_IN_PYTHON, {"properties": properties})
    for text in ('<f>a="x, )", b=5</f>', "<f></f>", '<f>b=null, c="y"</f>', '<f>c="y"</f>'):
        assert matches(tiny, compiled, text), text
    for text in ("<f>a=x</f>", "<f>a=5</f>", "<f>, b=5</f>", '<f>a="x"b=5</f>', "<f>b=5, </f>"):
        assert not matches(tiny, compiled, text), text


def test_strings_in_quotes_of_their_own_stand_beside_json(tiny: Vocabulary) -> None:
    properties = {"a": {"type": "string"}, "b": {"type": "array"}, "c": {"type": ["string", "integer"]}}
    compiled = grammar(tiny, IN_QUOTES, {"properties": properties})
    for text in ('<f>a:<q>it\'s "x"<q>,b:[1, "x"]</f>', "<f>c:5</f>", "<f>c:<q>5<q></f>", "<f>a:<q><q></f>"):
        assert matches(tiny, compiled, text), text
    for text in ("<f>a:x</f>", "<f>a:<q>x</f>", '<f>a:"x"</f>'):
        assert not matches(tiny, compiled, text), text


def test_digits_and_keys_are_bounded_in_values_alone(tiny: Vocabulary) -> None:
    schema = {"properties": {"s": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}}}
    compiled = grammar(tiny, BETWEEN_TAGS, schema)

    def may_follow(before: str, token: str) -> bool:
        state = compiled.start()
        for one in tiny.tokens.tokenize_str(before):
            state.advance(one)
        [number] = tiny.tokens.tokenize_str(token)
        return bool(state.allowed()[number // 8] >> number % 8 & 1)

    string, integer, any_object = (f"<f>\n<parameter={key}>\n" for key in "sno")
    assert may_follow(string + "1" * 40, "1")
    assert may_follow(string + '{"a": 1, "a', '"')
    assert not may_follow(integer + "1" * 20, "1")
    assert not may_follow(any_object + '{"a": 1, "a', '"')
    assert may_follow(string + '{"a": 1\n</parameter>\n<parameter=o>\n{"b": 1, "a', '"')


def test_an_answer_may_take_the_place_of_calls_between_tags(tiny: Vocabulary) -> None:
    compiled = grammar(tiny, BETWEEN_TAGS, {"properties": ANY_CITY}, answer='{"type": "array"}')
    assert matches(tiny, compiled, "[1, 2]")
    assert matches(tiny, compiled, tagged(city="Oslo"))


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"minProperties": 1}, "tools[0].parameters: #/minProperties: minProperties is not supported between tags"),
        ({"required": ["a"]}, "tools[0].parameters: #/required: a is not in properties"),
        (
            {"properties": {"a": {"oneOf": [{"type": "string"}, {"pattern": "x"}]}}},
            "#/properties/a/oneOf: its cases may overlap",
        ),
        ({"properties": {"a": {"format": "iri"}}}, "tools[0].parameters: #/properties/a/format: the format"),
        (
            {"properties": {"a": {"type": "object", "patternProperties": {"^x": {}}}}},
            "patternProperties are not supported beside arguments between tags",
        ),
        ({"properties": {"a": {"type": "string", "pattern": "("}}}, "tools[0].parameters: #/properties/a"),
        ({"properties": {"a": {"type": "string", "pattern": 5}}}, "tools[0].parameters: #/properties/a"),
        ({"properties": {"a": {"pattern": "a^b"}}}, "^ is supported only at the start of a pattern"),
    ],
)
def test_a_schema_that_cannot_be_written_between_tags_is_refused(
    tiny: Vocabulary, schema: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidGrammar) as refused:
        grammar(tiny, BETWEEN_TAGS, schema)
    assert message in str(refused.value)


def test_texts_without_an_end_of_strings_are_refused(tiny: Vocabulary) -> None:
    with pytest.raises(InvalidGrammar, match="after_text must end a string"):
        grammar(tiny, BETWEEN_TAGS | {"after_text": "\n"}, {"properties": ANY_CITY})
