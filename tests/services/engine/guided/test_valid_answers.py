"""Finished answers under hundreds of schemas, judged by `jsonschema`: tokens are chosen at random from the masks."""

import ipaddress
import json
import random
import re
from collections.abc import Callable
from datetime import datetime, time
from fractions import Fraction
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.constraint import ConstraintState
from services.engine.guided.grammar_sources import GrammarSpec, InvalidGrammar
from services.engine.guided.grammars import CompiledGrammar, Vocabulary

END = 2  # <|im_end|> of the demo model
SIZE = 49152
MAX_TOKENS = 80
WALKS = 2

# The judge


def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), f"repeated keys: {[name for name, _ in pairs]}"
    return dict(pairs)


def exactly(text: str) -> Any:
    return json.loads(text, parse_float=Fraction, object_pairs_hook=without_repeats)


FORMATS = jsonschema.FormatChecker(formats=())
DURATION = (
    r"P(?!$)(?:\d{1,9}W|(?:\d{1,9}Y)?(?:\d{1,9}M)?(?:\d{1,9}D)?(?:T(?=\d)(?:\d{1,9}H)?(?:\d{1,9}M)?(?:\d{1,9}S)?)?)"
)
LABEL = "[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"


@FORMATS.checks("date", raises=ValueError)
def is_date(text: Any) -> bool:
    return not isinstance(text, str) or bool(datetime.strptime(text, "%Y-%m-%d"))


@FORMATS.checks("time", raises=ValueError)
def is_time(text: Any) -> bool:
    return not isinstance(text, str) or (time.fromisoformat(text).tzinfo is not None and len(text) <= 24)


@FORMATS.checks("date-time", raises=ValueError)
def is_moment(text: Any) -> bool:
    return not isinstance(text, str) or (datetime.fromisoformat(text).tzinfo is not None and len(text) <= 35)


@FORMATS.checks("duration")
def is_duration(text: Any) -> bool:
    return not isinstance(text, str) or bool(re.fullmatch(DURATION, text, re.ASCII))


@FORMATS.checks("hostname")
def is_host(text: Any) -> bool:
    return not isinstance(text, str) or (len(text) <= 253 and all(re.fullmatch(LABEL, one) for one in text.split(".")))


@FORMATS.checks("email")
def is_mailbox(text: Any) -> bool:
    if not isinstance(text, str):
        return True
    local, _, domain = text.rpartition("@")
    return 0 < len(local) <= 64 and bool(re.fullmatch(r"[^\s@.]+(?:\.[^\s@.]+)*", local)) and is_host(domain)


@FORMATS.checks("uuid")
def is_uuid(text: Any) -> bool:
    return not isinstance(text, str) or bool(re.fullmatch("[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", text))


@FORMATS.checks("ipv4", raises=ValueError)
def is_ipv4(text: Any) -> bool:
    return not isinstance(text, str) or bool(ipaddress.IPv4Address(text))


@FORMATS.checks("ipv6", raises=ValueError)
def is_ipv6(text: Any) -> bool:
    return not isinstance(text, str) or bool(ipaddress.IPv6Address(text))


@FORMATS.checks("uri")
def is_uri(text: Any) -> bool:
    return not isinstance(text, str) or bool(re.match("[a-zA-Z][a-zA-Z0-9+.-]*:", text))


def validator_of(schema: Any) -> Any:
    """Return a validator of the schema's draft, with exact numbers."""
    draft = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    checker = draft.TYPE_CHECKER.redefine_many(
        {
            "number": lambda _, one: isinstance(one, int | Fraction) and not isinstance(one, bool),
            "integer": lambda _, one: isinstance(one, int | Fraction) and not isinstance(one, bool) and one % 1 == 0,
        }
    )
    return jsonschema.validators.extend(draft, type_checker=checker)(schema, format_checker=FORMATS)


# The walk


class Walker:
    """Writes answers at random: half of the time it prefers tokens that end something, else short ones or any."""

    def __init__(self, vocabulary: Vocabulary, ending: bytes = b'"}]', most_tokens: int = MAX_TOKENS) -> None:
        self._most_tokens = most_tokens
        self.vocabulary = vocabulary
        texts = [vocabulary.tokens.decode_bytes([token]) for token in range(SIZE)]
        ends = np.array([text[:1] in [bytes([byte]) for byte in ending] for text in texts])
        ends[END] = True
        quoted, short = np.array([b'"' in text for text in texts]), np.array([len(text) == 1 for text in texts])
        self._preferred = (ends, ends, quoted, short, np.ones(SIZE, bool))

    def answer(self, grammar: CompiledGrammar, source: random.Random) -> str | None:
        """Return a finished answer; None if it would be too long."""
        return self._walk(grammar.start(), lambda token, _: token == END, source)

    def calls_from(self, state: ConstraintState, source: random.Random) -> str | None:
        """Return the rest of calls, up to where text may follow; None if it would be too long."""
        return self._walk(state, lambda _, mask: bool(mask[END // 8] >> END % 8 & 1), source)

    def _walk(self, state: ConstraintState, is_end: Callable[[int, bytes], bool], source: random.Random) -> str | None:
        tokens = list[int]()
        for _ in range(self._most_tokens):
            token = self._choice(mask := state.allowed(), source)
            if is_end(token, mask) or state.complete:
                return self.vocabulary.tokens.decode_bytes(tokens).decode()
            tokens.append(token)
            state.advance(token)
        return None

    def _choice(self, mask: bytes, source: random.Random) -> int:
        allowed = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[:SIZE].astype(bool)
        preferred = np.flatnonzero(allowed & source.choice(self._preferred))
        return int(source.choice(preferred if len(preferred) else np.flatnonzero(allowed)))


@pytest.fixture(scope="module")
def walker(demo_model: Path) -> Walker:
    return Walker(Vocabulary(demo_model, SIZE, [END]))


def compiled(walker: Walker, schema: Any) -> CompiledGrammar:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return CompiledGrammar(walker.vocabulary, GrammarSpec("json_schema", text))


def refusal_of(walker: Walker, schema: Any) -> str:
    """Return the reason why a schema is refused, empty if it is not."""
    try:
        compiled(walker, schema)
    except InvalidGrammar as refusal:
        return str(refusal)
    return ""


def finished(walker: Walker, schema: Any, seed: int) -> list[str]:
    """Return the finished answers of some walks, after a check that they are valid."""
    grammar, source = compiled(walker, schema), random.Random(seed)
    validator = validator_of(schema)
    answers = [answer for _ in range(WALKS) if (answer := walker.answer(grammar, source)) is not None]
    for answer in answers:
        value = exactly(answer)
        assert validator.is_valid(value), f"{answer} under {schema}: {next(validator.iter_errors(value)).message}"
    return answers


# Schemas of clients


def closed(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object with exactly these properties."""
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def keys(pattern: str, **keywords: Any) -> dict[str, Any]:
    """Return the schema of an object whose keys match a pattern."""
    return {
        "type": "object",
        "patternProperties": {pattern: {"type": "boolean"}},
        "additionalProperties": False,
    } | keywords


def listed(items: Any, **keywords: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "uniqueItems": True} | keywords


INTEGER, BOOLEAN, WORD = {"type": "integer"}, {"type": "boolean"}, {"type": "string", "maxLength": 8}
LOOK_AHEAD = {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}  # pydantic's of a Decimal
DECIMAL = {"anyOf": [{"type": "number"}, LOOK_AHEAD]}
COLOUR = {"enum": ["red", "green", "blue"], "title": "Colour", "type": "string"}
LINK = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/link"}, {"type": "null"}]}}}
LINK |= {"required": ["next"], "additionalProperties": False}

PETS = {
    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
    "discriminator": {"propertyName": "kind"},
    "$defs": {"Cat": closed(kind={"const": "cat"}, lives=INTEGER), "Dog": closed(kind={"const": "dog"}, barks=BOOLEAN)},
}
SERVED: list[Any] = [
    # keys that may repeat
    {"type": "object", "additionalProperties": INTEGER, "minProperties": 2},
    {"type": "object", "additionalProperties": BOOLEAN, "minProperties": 3, "maxProperties": 4},
    {
        "type": "object",
        "properties": {"a": INTEGER},
        "additionalProperties": WORD,
        "required": ["a"],
        "minProperties": 3,
    },
    {"type": "object", "properties": {"a": INTEGER}, "additionalProperties": WORD},
    *[
        keys(pattern, minProperties=2)
        for pattern in ("^[ab]$", "^202[01]$", "^(foo|bar|baz)$", "^a+$", "^x", "^(a|b+)$")
    ],
    keys("^[a-c]$"),
    keys("^[a-c]$", minProperties=3),
    keys("^k$", minProperties=1),
    keys("^[a-z]{2}_[0-9]$", minProperties=4),
    keys("^(n|ame|name)$", properties={"na": INTEGER}),
    {"type": "object", "patternProperties": {"^k$": INTEGER}, "minProperties": 2},
    {"type": "object", "patternProperties": {"^k": INTEGER}, "additionalProperties": BOOLEAN, "minProperties": 3},
    # keys that are required, or have names
    keys("^S_", required=["S_a"]),
    {"required": ["ab", "b"], "patternProperties": {"^a": WORD}, "additionalProperties": INTEGER, "type": "object"},
    {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": INTEGER},
    {"type": "object", "propertyNames": {"type": "string", "enum": ["x", "y"]}, "additionalProperties": INTEGER},
    {"type": "object", "propertyNames": True, "properties": {"a": BOOLEAN}, "additionalProperties": False},
    {"type": "object", "propertyNames": {"enum": ["x"]}, "properties": {"x": INTEGER, "y": INTEGER}},
    # unique items
    listed(COLOUR),
    listed({"$ref": "#/$defs/colour"}, minItems=2, **{"$defs": {"colour": COLOUR}}),
    listed(BOOLEAN),
    listed({"const": 1}, minItems=1),
    listed({"type": "integer", "enum": [1, 1.0, 2.5, 3]}),
    listed({"enum": list("abcdefghij")}, maxItems=3),
    listed({}, maxItems=1),
    {"uniqueItems": True, "items": COLOUR, "minLength": 2, "maxLength": 6},
    {"type": ["array", "null"], "items": BOOLEAN, "uniqueItems": True},
    # parts without a finite text that can be avoided
    {"$ref": "#/$defs/link", "$defs": {"link": LINK}},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False},
    {"type": "array", "items": {"$ref": "#"}, "maxItems": 2},
    closed(a={"anyOf": [closed(b={"$ref": "#/properties/a/anyOf/0"}), BOOLEAN]}),
    {"type": "object", "properties": {"a": {"type": "string", "const": 5}}, "additionalProperties": False},
    {"type": "array", "prefixItems": [BOOLEAN, {"$ref": "#/$defs/x"}], "$defs": {"x": closed(x={"$ref": "#/$defs/x"})}},
    {"type": "object", "properties": {"a": {"$ref": "#"}}, "allOf": [{"minProperties": 0}]},
    {"type": "object", "properties": {"a": {"anyOf": [True, {"$ref": "#"}]}}, "required": ["a"], "maxProperties": 1},
    # cases that exclude each other behind references
    PETS,
    closed(pet={"oneOf": [{"$ref": "#/$defs/Cat"}, {"type": "null"}]}) | {"$defs": PETS["$defs"]},
    {"oneOf": [{"$ref": "#/$defs/a"}, BOOLEAN], "$defs": {"a": {"$ref": "#/$defs/b"}, "b": INTEGER}},
    # keys with quotes and backslashes
    keys('^[ab"]$', minProperties=3),
    keys('^["\\\\\\n]$', minProperties=3),
    keys('^"{1,2}$', minProperties=2),
    keys("^[!-/]$", minProperties=5),
    # cases that are left out
    closed(price=DECIMAL, count=INTEGER),
    closed(a={"anyOf": [{"not": {}}, {"type": "array", "uniqueItems": True}, BOOLEAN]}),
    {"oneOf": [{"type": "number"}, LOOK_AHEAD]},
    {"oneOf": [closed(kind={"const": "a"}, price=DECIMAL), closed(kind={"const": "b"})]},
    # keywords that llguidance reads apart
    {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "additionalItems": False}
    | {"anyOf": [{"minItems": 1}, {"maxItems": 5}], "items": [INTEGER]},
    {"type": "array", "prefixItems": [WORD], "additionalItems": BOOLEAN, "items": INTEGER},
    {"$schema": "http://json-schema.org/draft-04/schema#", "type": "number", "exclusiveMinimum": True, "minimum": 0}
    | {"maximum": 0.001},
    # formats
    *[{"type": "string", "format": name} for name in sorted(FORMATS.checkers)],
    *[closed(a={"format": name, "type": "string", "pattern": "1"}) for name in ("date", "time", "duration", "email")],
    {"type": "string", "format": "hostname", "maxLength": 5},
]

REFUSED: list[tuple[Any, str]] = [
    (keys("^k$", minProperties=2), "#/minProperties needs more keys than its patternProperties have"),
    (keys("^[ab]$", minProperties=3), "#/minProperties needs more keys"),
    (closed(a=keys("^k$", minProperties=3, required=["k"])), "#/properties/a/minProperties needs more keys"),
    (
        closed(a={"type": "object", "additionalProperties": False, "minProperties": 1}),
        "#/properties/a: its keywords excl",
    ),
    ({"type": "object", "properties": {"a": BOOLEAN, "b": BOOLEAN, "c": BOOLEAN}, "minProperties": 2}, "#: min/maxPro"),
    ({"type": "object", "patternProperties": {"^(?!S_)": INTEGER}}, "#/patternProperties/^(?!S_): look-around"),
    (
        closed(a={"type": "object", "propertyNames": {"pattern": "^a"}}),
        "#/properties/a/propertyNames: propertyNames is not",
    ),
    (closed(a={"$ref": "#"}), "#/properties/a/$ref: it requires itself without end"),
    ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, "#/items/$ref: it requires itself without end"),
    (
        {"allOf": [{"type": "object", "properties": {"a": {"$ref": "#"}}}, {"required": ["a"]}]},
        "#/allOf/0/properties/a/$ref: it requires itself without end",
    ),
    (
        {
            "$ref": "#/$defs/B",
            "properties": {"a": {"$ref": "#"}},
            "$defs": {"B": {"type": "object", "required": ["a"]}},
        },
        "#/properties/a/$ref: it requires itself without end",
    ),
    (
        {"allOf": [{"type": "array", "items": {"$ref": "#"}}, {"minItems": 1}]},
        "#/allOf/0/items/$ref: it requires itself",
    ),
    (
        {
            "type": "object",
            "properties": {"a": {"$ref": "#"}},
            "anyOf": [{"required": ["a"]}, {"required": ["a", "b"]}],
        },
        "#: its keywords exclude each other",
    ),
    (
        {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {"a": INTEGER, "b": {"type": "number"}}},
        "#/oneOf: its cases may overlap",
    ),
    ({"$ref": "#"}, "#/$ref: it leads back to itself for the same value"),
    ({"anyOf": [{"type": "null"}, {"allOf": [{"$ref": "#"}]}]}, "#/anyOf/1/allOf/0/$ref: it leads back to itself"),
    (closed(a=closed(b={"$ref": "#/properties/a"})), "#/properties/a/properties/b/$ref: it requires itself"),
    (closed(a={"anyOf": [closed(b={"$ref": "#"}), {"type": "string", "enum": [5]}]}), "#/properties/a/anyOf/0/prop"),
    (closed(a={"type": "string", "const": 5}), "#/properties/a: its keywords exclude each other"),
    (keys("^a", required=["b"]), "#/additionalProperties: no output matches it"),
    (closed(a=False), "#/properties/a: no output matches it"),
    (closed(a={"type": "string", "minLength": 3, "maxLength": 2}), "#/properties/a: its keywords exclude each other"),
    ({"type": "array", "minItems": 10**9}, "#/minItems is 1000000000, which no output reaches"),
    ('{"type": "array", "minItems": 1e400}', "#/minItems must be a non-negative integer, not 1e400"),
    (listed({"enum": list("abcdefghij")}), "#/uniqueItems admits 9864101 arrays; it is supported up to 2000"),
    (listed(INTEGER), "#/uniqueItems is supported only where items lists its values"),
    (listed(BOOLEAN, minItems=3), "#/minItems is 3, but only 2 items differ"),
    (closed(a={"const": "a\x01"}), "#/properties/a/const has the control character U+0001"),
    ({"anyOf": {}}, "#/anyOf must be an array, not {}"),
    (closed(a={"enum": "abc"}), '#/properties/a/enum must be an array, not "abc"'),
    ({"type": "array", "uniqueItems": "true"}, '#/uniqueItems must be true or false, not "true"'),
    ({"anyOf": [LOOK_AHEAD, LOOK_AHEAD]}, "#/anyOf/1/pattern: look-around"),
    ({"oneOf": [WORD, LOOK_AHEAD]}, "#/oneOf: its cases may overlap"),
    (
        closed(a={"$ref": "#/$defs/x"}, b={"oneOf": [{"$ref": "#/$defs/x"}, WORD]}) | {"$defs": {"x": DECIMAL}},
        "#/properties/b/oneOf: its cases may overlap",
    ),
    ({"oneOf": [closed(a=INTEGER), closed(a={"anyOf": [INTEGER, LOOK_AHEAD]})]}, "#/oneOf: its cases may overlap"),
    (
        {"anyOf": [{"type": "string", "minimun": 3}, {"type": "null"}]},
        "#/anyOf/0/minimun: minimun is not a JSON schema",
    ),
    ({"anyOf": [{"type": "string", "pattern": "("}, {"type": "null"}]}, "#/anyOf/0/pattern: unclosed group"),
]


@pytest.mark.parametrize("schema", SERVED, ids=lambda schema: json.dumps(schema)[:60])
def test_answers_are_finished_and_valid(walker: Walker, schema: Any) -> None:
    assert any(finished(walker, schema, seed) for seed in range(5))


@pytest.mark.parametrize(("schema", "reason"), REFUSED, ids=lambda one: json.dumps(one)[:60])
def test_a_schema_that_cannot_be_followed_is_refused_by_its_place(walker: Walker, schema: Any, reason: str) -> None:
    assert refusal_of(walker, schema).startswith(reason)


def test_what_is_left_out_is_named_with_its_place(walker: Walker) -> None:
    schema = closed(price=DECIMAL, other={"anyOf": [{"not": {}}, {"type": "string", "format": "colour"}, BOOLEAN]})
    assert set(compiled(walker, schema).omitted) == {
        "#/properties/other/anyOf/0 was left out: #/properties/other/anyOf/0/not: not is not supported",
        "#/properties/price/anyOf/1 was left out: #/properties/price/anyOf/1/pattern: look-around, including "
        "look-ahead and look-behind, is not supported",
        "#/properties/other/anyOf/1 was left out: #/properties/other/anyOf/1/format: the "
        'format "colour" is not supported',
    }


# Drawn schemas


NAMES = st.sampled_from(["a", "b", "key", "x_1", "foo", "", "ü", 'q"\\', "kk"])
VALUES = st.sampled_from([None, True, False, 0, 1, -3, 1.0, 2.5, "a", "b", "x_1", "", "é", "\n", [], [1], {}, {"a": 1}])
FORMATTED = st.sampled_from(sorted(FORMATS.checkers)).map(lambda name: {"type": "string", "format": name})
PATTERNS = st.sampled_from(["^a", "b$", "^[ab]{1,2}$", "a|b", "^x_[0-9]+$", "^$", "^(foo|bar)$", r"^\d{2}-\w$", "[^a]"])
KEYS = st.sampled_from(["^k", "^[ab]$", "^x_[0-9]$", "^(foo|bar)$", "oo$", "^[a-z]+$", "q", "^.{2}$"])
SIZES = st.integers(0, 4)


def optional(**keywords: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=keywords)


def together(*parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.tuples(*parts).map(lambda all_parts: {name: value for part in all_parts for name, value in part.items()})


NUMBERS = together(
    st.sampled_from([{"type": "number"}, {"type": "integer"}, {}]),
    optional(
        minimum=st.sampled_from([-5, 0, 0.5, 3]),
        maximum=st.sampled_from([-1, 3, 3.5, 1e6]),
        exclusiveMinimum=st.sampled_from([0, 2, 2.25]),
        exclusiveMaximum=st.sampled_from([3, 4, 100]),
        multipleOf=st.sampled_from([2, 0.25, 3]),
    ),
)
STRINGS = together(
    st.sampled_from([{"type": "string"}, {"type": ["string", "null"]}, {}]),
    optional(minLength=SIZES, maxLength=SIZES, pattern=PATTERNS, format=st.sampled_from(sorted(FORMATS.checkers))),
)
LEAVES = st.one_of(
    NUMBERS,
    STRINGS,
    FORMATTED,
    VALUES.map(lambda value: {"const": value}),
    st.lists(VALUES, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    st.sampled_from([{}, True, False, {"type": "boolean"}, {"type": "null"}, {"type": ["integer", "string"]}]),
    st.sampled_from([{"$ref": "#"}, {"$ref": "#/$defs/d"}, {"$ref": "#/$defs/e"}]),
)
LISTED = st.one_of(
    st.lists(VALUES, min_size=1, max_size=4).map(lambda values: {"enum": values}),
    st.sampled_from(
        [{"type": "boolean"}, {"const": 1}, {"$ref": "#/$defs/d"}, {"type": "integer", "enum": [1, 2.5, 3]}]
    ),
)


def grow(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = optional(
        properties=st.dictionaries(NAMES, inner, max_size=3),
        patternProperties=st.dictionaries(KEYS, inner, min_size=1, max_size=2),
        additionalProperties=inner,
        required=st.lists(NAMES, max_size=2, unique=True),
        minProperties=SIZES,
        maxProperties=SIZES,
        propertyNames=st.sampled_from([True, {}, {"type": "string"}, {"enum": ["a", "b", "key"]}]),
    )
    arrays = optional(items=inner, minItems=SIZES, maxItems=SIZES, prefixItems=st.lists(inner, min_size=1, max_size=2))
    unique = together(st.just({"uniqueItems": True}), optional(items=LISTED, minItems=SIZES, maxItems=SIZES))
    cases = st.lists(inner, min_size=1, max_size=3)
    combined = st.one_of(*[cases.map(lambda parts, name=name: {name: parts}) for name in ("anyOf", "oneOf", "allOf")])
    typed = st.sampled_from([{}, {}, {"type": "object"}, {"type": "array"}, {"type": ["object", "array"]}])
    return st.one_of(
        together(typed, objects),
        together(typed, arrays),
        together(typed, unique),
        combined,
        together(objects, combined),
        together(arrays, combined),
        together(combined, STRINGS),
    )


SCHEMAS = st.recursive(LEAVES, grow, max_leaves=6)
ROOTS = st.tuples(SCHEMAS, SCHEMAS, SCHEMAS).map(
    lambda parts: (
        (parts[0] if isinstance(parts[0], dict) else {"anyOf": [parts[0]]}) | {"$defs": {"d": parts[1], "e": parts[2]}}
    )
)


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(schema=ROOTS, seed=st.integers(0, 2**32))
def test_finished_answers_are_valid_under_drawn_schemas(walker: Walker, schema: Any, seed: int) -> None:
    if refusal := refusal_of(walker, schema):
        assert refusal.startswith("#")
    else:
        finished(walker, schema, seed)
