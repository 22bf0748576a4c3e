"""Schemas prepared for llguidance: numbers against an exact validator, keywords, and the docs' list of them."""

import json
import random
import re
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from engine.errors import ConstraintFailed
from services.engine.guided.grammar_sources import GrammarSpec, InvalidGrammar
from services.engine.guided.grammars import CompiledGrammar, Vocabulary
from services.engine.guided.schemas.json_schemas import ENFORCED, UNSUPPORTED
from services.engine.guided.schemas.prepared_schema import prepare_schema
from services.engine.guided.schemas.schema_nodes import ANNOTATIONS, InvalidSchema
from tests.services.engine.guided import test_grammars
from tests.services.engine.guided.test_grammars import END
from tests.tiny_models import VOCABULARY

DOCS = Path(__file__).parents[4] / "docs" / "guided-decoding.md"
MAX_TOKENS = 120
BIG = 2**53 + 1


@pytest.fixture(scope="module")
def tiny(tiny_model: Callable[[str], Path]) -> Vocabulary:
    return Vocabulary(tiny_model("llama"), VOCABULARY, [END])


def compiled(vocabulary: Vocabulary, schema: object) -> CompiledGrammar:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return CompiledGrammar(vocabulary, GrammarSpec("json_schema", text))


def admits(vocabulary: Vocabulary, schema: object, text: str) -> bool:
    return test_grammars.admits(compiled(vocabulary, schema), vocabulary, text)


def of_draft(draft: str, keyword: str) -> dict[str, Any]:
    return {"$schema": f"http://json-schema.org/{draft}/schema#", "properties": {"a": {keyword: []}}}


def random_text(vocabulary: Vocabulary, language: CompiledGrammar, source: random.Random) -> str | None:
    """Follow the masks at random. Return None if the text does not end or llguidance fails."""
    state, tokens = language.start(), list[int]()
    with suppress(ConstraintFailed):
        for _ in range(MAX_TOKENS):
            mask = int.from_bytes(state.allowed(), "little")
            token = source.choice([token for token in range(VOCABULARY) if mask >> token & 1])
            if token == END:
                return vocabulary.tokens.decode_str(tokens)
            tokens.append(token)
            state.advance(token)
            if state.allowed() and state.complete:
                return vocabulary.tokens.decode_str(tokens)
    return None


def exactly(text: str) -> Any:
    return json.loads(text, parse_float=Fraction)


def is_valid(schema_text: str, text: str) -> bool:
    """Validate with exact integers and decimals."""
    checker = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine_many(
        {
            "number": lambda _, one: isinstance(one, int | Fraction) and not isinstance(one, bool),
            "integer": lambda _, one: isinstance(one, int | Fraction) and not isinstance(one, bool) and one % 1 == 0,
        }
    )
    validator = jsonschema.validators.extend(jsonschema.Draft202012Validator, type_checker=checker)
    return validator(exactly(schema_text)).is_valid(exactly(text))


# Numbers


near = st.sampled_from([0, 7, 10**15, 2**53, 2**62, 10**18, 2**63, 2**64, 10**20]).flatmap(
    lambda place: st.integers(place - 3, place + 3)
)
integers = st.one_of(near, near.map(lambda number: -number), st.integers(-(10**21), 10**21))
decimals = st.one_of(
    st.decimals(-1000, 1000, allow_nan=False, places=3).map(str),
    st.sampled_from(
        ["0.12345678901234567890123", "-0.0", "1e400", "-1e400", "1e-400", "1e22", "5.0", "9007199254740993.0"]
    ),
    st.sampled_from(["0.1000000000000000055", "1e5", "123456789.123456789123", "4.611686018427388e18", "1e18"]),
)
numbers = st.one_of(integers.map(str), decimals)
bounds = st.fixed_dictionaries(
    {"type": st.sampled_from(['"integer"', '"number"'])},
    optional=dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), numbers)
    | {"multipleOf": st.sampled_from(["3", "0.01", "2.5", "65537", "4294967295", "1e-6", "9007199254740993"])},
)


def narrow_bounds(lower: str, upper: str, ends: tuple[Decimal, Decimal], multiple: str | None) -> dict[str, str]:
    keywords = {"type": '"number"', lower: f"{min(ends):f}", upper: f"{max(ends):f}"}
    return keywords if multiple is None else keywords | {"multipleOf": multiple}


narrow = st.builds(
    narrow_bounds,
    st.sampled_from(["minimum", "exclusiveMinimum"]),
    st.sampled_from(["maximum", "exclusiveMaximum"]),
    st.tuples(
        st.sampled_from(["0", "1", "-1", "280.0", "-7", "1000000", "0.5"]).map(Decimal),
        st.sampled_from(["1e-13", "1e-7", "1.6e-5", "0.001", "0.25", "0.5", "1", "-0.3", "-1e-7", "-2"]).map(Decimal),
    ).map(lambda one: (one[0], one[0] + one[1])),
    st.sampled_from([None, None, "0.25", "0.1", "1e-6"]),
)
constants = st.one_of(
    numbers.map(lambda number: {"const": number}),
    st.lists(numbers, min_size=1, max_size=3).map(lambda many: {"enum": f"[{', '.join(many)}]"}),
    numbers.map(lambda number: {"type": '"integer"', "const": number}),
    numbers.map(lambda number: {"const": f'{{"a": [{number}, {{"b": {number}}}]}}'}),
)


def written(keywords: dict[str, str]) -> str:
    return "{" + ", ".join(f'"{name}": {value}' for name, value in keywords.items()) + "}"


def wrapped(schema: str, how: int) -> str:
    """Return a schema with `schema` as a part of it."""
    places = [
        "%s",
        '{"type": "object", "properties": {"a": %s}, "required": ["a"], "additionalProperties": false}',
        '{"type": "array", "items": %s, "minItems": 1, "maxItems": 2}',
        '{"anyOf": [{"const": "none"}, %s]}',
        '{"$ref": "#/$defs/n", "$defs": {"n": %s}}',
        '{"type": "object", "required": ["b"], "patternProperties": {"^b": %s}, "additionalProperties": false}',
        '{"allOf": [%s, {"type": ["integer", "number", "object"]}]}',
    ]
    return places[how].replace("%s", schema)


def check_walks(tiny: Vocabulary, schema: str, source: random.Random) -> None:
    """Check that texts of random walks through a schema's masks are exactly valid."""
    try:
        language = compiled(tiny, schema)
    except InvalidGrammar:
        assume(False)
    for _ in range(3):
        text = random_text(tiny, language, source)
        assert text is None or is_valid(schema, text), text


@settings(max_examples=200, deadline=None, derandomize=True)
@given(keywords=st.one_of(bounds, constants, narrow), how=st.integers(0, 6), seed=st.integers(0, 2**32))
def test_every_admitted_text_is_exactly_valid(tiny: Vocabulary, keywords: dict[str, str], how: int, seed: int) -> None:
    schema, source = wrapped(written(keywords), how), random.Random(seed)
    check_walks(tiny, schema, source)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(keywords=narrow, how=st.integers(0, 2), seed=st.integers(0, 2**32))
def test_intersecting_bounds_admit_only_valid_texts(
    tiny: Vocabulary, keywords: dict[str, str], how: int, seed: int
) -> None:
    parts, source = [written({name: value}) for name, value in keywords.items()], random.Random(seed)
    schema = [
        f'{{"allOf": [{", ".join(parts)}]}}',
        f'{{"$ref": "#/$defs/n", {written(dict(list(keywords.items())[2:]))[1:-1]}, '
        f'"$defs": {{"n": {written(dict(list(keywords.items())[:2]))}}}}}',
        f'{{"type": "object", "properties": {{"a": {parts[1]}}}, "required": ["a"], "additionalProperties": false, '
        f'"patternProperties": {{"a": {parts[2]}, "^a": {{"type": "number"}}}}}}',
    ][how]
    check_walks(tiny, schema, source)


@pytest.mark.parametrize(
    ("schema", "admitted", "refused"),
    [
        ('{"exclusiveMinimum": 0}', ["0.01", "1", "19.99"], ["0", "-1", "0.0"]),
        ('{"exclusiveMinimum": 0, "exclusiveMaximum": 1}', ["0.00000001", "0.5", "0.99"], ["0", "1", "-0", "1.0"]),
        ('{"minimum": 0, "maximum": 1}', ["0", "0.5", "1"], ["1.1", "-0.1"]),
        ('{"exclusiveMinimum": 0, "maximum": 0.001}', ["0.001", "0.00000001"], ["0", "0.0", "0.002"]),
        ('{"minimum": -1e-7, "exclusiveMaximum": 0}', ["-0.0000001", "-0.00000001"], ["0", "-0", "-0.0"]),
        ('{"exclusiveMinimum": 0, "maximum": 1e-20}', ["0.00000000000000000001"], ["0"]),
        ('{"exclusiveMinimum": 280.0, "maximum": 280.5, "multipleOf": 0.25}', ["280.25"], ["280"]),
        ('{"minimum": 1000000.0000000001, "maximum": 1000001}', ["1000000.00000001"], ["1000000"]),
        ('{"exclusiveMaximum": -3, "minimum": -3.5}', ["-3.5", "-3.00000001"], ["-3", "-3.0"]),
    ],
)
def test_an_excluded_bound_is_not_admitted(
    tiny: Vocabulary, schema: str, admitted: list[str], refused: list[str]
) -> None:
    typed = '{"type": "number", ' + schema[1:]
    assert [text for text in [*admitted, *refused] if admits(tiny, typed, text)] == admitted


@settings(max_examples=100, deadline=None, derandomize=True)
@given(number=integers)
def test_an_integer_constant_is_admitted_or_refused_with_its_path(tiny: Vocabulary, number: int) -> None:
    for schema, place in (
        ({"const": number}, "#/const"),
        ({"enum": ["a", number]}, "#/enum/1"),
        ({"type": "integer", "const": number}, "#/const"),
    ):
        try:
            compiled(tiny, schema)
        except InvalidGrammar as error:
            refusal = str(error)
        else:
            assert admits(tiny, schema, str(number))
            assert not admits(tiny, schema, str(number + 1))
            continue
        assert refusal.startswith(f"{place} is {number}, which has more digits")
        assert abs(number) > 2**53


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"const": BIG}, "#/const"),
        ({"properties": {"id": {"enum": [1, BIG]}}}, "#/properties/id/enum/1"),
        ({"allOf": [{"type": "object"}, {"const": {"a": [0, BIG]}}]}, "#/allOf/1/const/a/1"),
        ({"$defs": {"x": {"const": BIG}}, "type": "object"}, "#/$defs/x/const"),
        ({"$ref": "#/x-parts/y", "x-parts": {"y": {"const": BIG}}}, "#/x-parts/y/const"),
        ({"items": [{"const": -BIG}]}, "#/items/0/const"),
        ({"patternProperties": {"a/b~": {"const": BIG}}}, "#/patternProperties/a~1b~0/const"),
        ({"additionalProperties": {"prefixItems": [{}, {"const": BIG}]}}, "#/additionalProperties/prefixItems/1/const"),
        ('{"const": 1e400}', "#/const"),
        ('{"const": 0.12345678901234567890123}', "#/const"),
        ('{"const": 1000000.0000000001}', "#/const"),
        ({"type": "integer", "minimum": 10**20}, "#/minimum"),
        ({"type": "integer", "exclusiveMaximum": -(10**18)}, "#/exclusiveMaximum"),
        ('{"type": "number", "minimum": 1e-400}', "#/minimum"),
        ({"type": "integer", "multipleOf": BIG}, "#/multipleOf"),
        ('{"multipleOf": 0.12345678901234567}', "#/multipleOf"),
        ({"multipleOf": 0}, "#/multipleOf"),
        ({"minLength": 10**20}, "#/minLength"),
        ({"maxItems": -1}, "#/maxItems"),
        ({"minProperties": 1.5}, "#/minProperties"),
        ({"type": "integer", "minimum": BIG, "maximum": BIG}, "#: no double lies between"),
        ({"allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}]}, "#: multipleOf: the least common multiple"),
    ],
)
def test_a_value_that_would_change_is_refused_with_its_path(schema: object, place: str) -> None:
    with pytest.raises(InvalidSchema, match=f"^{re.escape(place)}"):
        prepare_schema(schema if isinstance(schema, str) else json.dumps(schema))


@pytest.mark.parametrize(
    ("bound", "admitted", "refused"),
    [
        ({"maximum": 2**63 - 1}, 10**18, 2**63),
        ({"minimum": -(2**63)}, -(10**18), -(2**63) - 1),
        ({"minimum": 0, "maximum": 2**64 - 1}, 10**18, 2**64),
        ({"maximum": 10**20}, 10**18, 10**20 + 1),
        ({"maximum": BIG}, BIG - 1, BIG + 1),
        ({"exclusiveMaximum": BIG}, BIG - 2, BIG),
        ({"exclusiveMinimum": 2**53}, 10**16, 2**53),
        ({"exclusiveMinimum": -(2**53)}, 2 - 2**53, -(2**53)),
        ({"minimum": 665254580340503029}, 665254580350000000, 665254580340503028),
    ],
)
def test_a_bound_between_doubles_moves_inwards(
    tiny: Vocabulary, bound: dict[str, int], admitted: int, refused: int
) -> None:
    schema = {"type": "integer"} | bound
    assert admits(tiny, schema, str(admitted))
    assert not admits(tiny, schema, str(refused))


def test_multiples_of_different_properties_are_supported(tiny: Vocabulary) -> None:
    properties = {name: {"type": "integer", "multipleOf": multiple} for name, multiple in (("a", 65537), ("b", 65539))}
    assert admits(tiny, {"type": "object", "properties": properties}, '{"a":65537,"b":131078}')


# Keywords


def test_docs_list_every_keyword_as_the_code_does() -> None:
    text = DOCS.read_text()
    for title, keywords in (("Enforced", ENFORCED), ("Annotations", ANNOTATIONS), ("Refused", UNSUPPORTED)):
        section = text.split(f"\n### {title}\n")[1].split("\n#")[0]
        cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
        assert sorted(re.findall("`([^`]+)`", " ".join(cells))) == sorted(keywords), title


@pytest.mark.parametrize("keyword", sorted(UNSUPPORTED))
@pytest.mark.parametrize("value", [True, {}])
def test_an_unsupported_keyword_is_refused_with_its_path(keyword: str, value: object) -> None:
    with pytest.raises(InvalidSchema, match=rf"^#/properties/a/{re.escape(keyword)}: .* not supported"):
        prepare_schema(json.dumps({"properties": {"a": {"type": "string", keyword: value}}}))


@pytest.mark.parametrize("keyword", sorted(ANNOTATIONS | {"x-order"}))
def test_an_annotation_changes_nothing(tiny: Vocabulary, keyword: str) -> None:
    for value in ('"base64"', "[1e400, 9007199254740993]", '{"minimun": 3}', "true"):
        plain = {"type": "string", "enum": ["a", "b"]}
        annotated = json.dumps(plain)[:-1] + f', "{keyword}": {value}' + "}"
        assert prepare_schema(annotated).root == plain


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"anyOf": [{"type": "integer", "minimun": 3}]}, "#/anyOf/0/minimun: .*did you mean minimum"),
        ({"additionalproperties": 3}, "#/additionalproperties: .*did you mean additionalProperties"),
        ({"anyOf": [{"type": "integer", "maxLenght": 3}]}, "#/anyOf/0/maxLenght: .*did you mean maxLength"),
        ({"anyOf": [{"type": "integer", "colour": 3}]}, "#/anyOf/0/colour: .*begin with x-"),
        (
            {"properties": {"a": {"$ref": "#/$defs/b"}}},
            r'#/properties/a/\$ref is "#/\$defs/b", which is not in the schema',
        ),
        ({"items": {"$ref": "https://example.org/a"}}, '#/items/.*is "https://example.org/a", which is not in'),
        ({"$ref": 5}, r"#/\$ref must be a string, not 5"),
        ({"nullable": True}, "#/nullable"),
        ({"type": "string", "nullable": "yes"}, "#/nullable"),
        (of_draft("draft-04", "const"), "#/properties/a/const: .* not a keyword of draft-04"),
        (of_draft("draft-07", "prefixItems"), "#/properties/a/prefixItems: .* not a keyword of draft-07"),
        ("NaN", ".*is not a JSON number"),
        ('{"const": Infinity}', ".*is not a JSON number"),
        ('{"default": -Infinity}', ".*is not a JSON number"),
    ],
)
def test_an_invalid_schema_is_refused_with_its_path_and_reason(schema: object, reason: str) -> None:
    with pytest.raises(InvalidSchema, match=f"^{reason}"):
        prepare_schema(schema if isinstance(schema, str) else json.dumps(schema))


@pytest.mark.parametrize(
    ("schema", "refusal"),
    [
        (
            {"properties": {"a": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}},
            "#/properties/a/oneOf: its cases may overlap; use anyOf, or cases that differ in type or in a required ",
        ),
        ({"items": {"type": "string", "pattern": "("}}, "#/items/pattern: unclosed group"),
        ({"items": {"type": "string", "pattern": "(?=a)b"}}, "#/items/pattern: look-around, "),
        ({"type": "string", "pattern": "a^b"}, "#/pattern: ^ is supported only at the start of a pattern"),
        ({"patternProperties": {"/(": {}}}, "#/patternProperties/~1(: unclosed group"),
        ({"properties": {"a": {"type": "string", "format": "foo"}}}, '#/properties/a/format: the format "foo" is not '),
        (
            {"items": {"$ref": "#/$defs/x"}, "$defs": {"x": {"type": "string", "pattern": "["}}},
            "#/$defs/x/pattern: unclosed character class",
        ),
        ({"properties": {"a": 5}}, "#/properties/a: schema must be an object or boolean"),
        ({"items": {"required": 5}}, "#/items/required: Expected array"),
        ({"items": {"$ref": "https://json-schema.org/x"}}, '#/items/$ref: "https://json-schema.org/x" is not in the '),
        ({"items": {"type": []}}, "#/items/type must have at least one entry"),
        ({"$schema": "foo"}, "#/$schema must be that of draft 4 or later, "),
        ({"$schema": 5}, "#/$schema must be that of draft 4 or later, "),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_its_place_in_plain_words(
    tiny: Vocabulary, schema: object, refusal: str
) -> None:
    with pytest.raises(InvalidGrammar) as caught:
        compiled(tiny, schema)
    assert str(caught.value).startswith(refusal)


@pytest.mark.parametrize("pattern", [r"[\d.]+", r"\D", r"\w", r"[^\W]", r"\s", r"\S"])
def test_a_regular_expression_has_the_classes_of_a_pattern(tiny: Vocabulary, pattern: str) -> None:
    texts = ["5", "\u0663", "a", "\u00e4", "_", " ", "\u00a0", "-", "."]
    language = CompiledGrammar(tiny, GrammarSpec("regex", pattern))
    schema = {"type": "string", "pattern": f"^{pattern}$"}
    admitted = [text for text in texts if test_grammars.admits(language, tiny, text)]
    assert admitted == [text for text in texts if admits(tiny, schema, json.dumps(text, ensure_ascii=False))]
    assert "\u0663" not in admitted or pattern in (r"\D", r"\S")


@pytest.mark.parametrize(
    ("pattern", "operation"),
    [("^[a-z&&[^b]]$", "&&"), ("^[[:alpha:]]+$", "["), ("^[+--]$", "--"), ("^[a~~b]$", "~~"), ("^[]a]$", "]")],
)
def test_what_is_an_operation_in_rusts_classes_and_characters_in_json_schemas_is_refused(
    pattern: str, operation: str
) -> None:
    for schema, where in (
        ({"properties": {"a": {"pattern": pattern}}}, "#/properties/a/pattern"),
        ({"patternProperties": {pattern: True}}, "#/patternProperties/" + pattern.replace("~", "~0")),
    ):
        with pytest.raises(InvalidSchema) as refused:
            prepare_schema(json.dumps(schema))
        sentence = f"{where}: {operation} in a class of characters is supported only with a backslash"
        assert str(refused.value) == sentence


@pytest.mark.parametrize("pattern", [r"^[\]\[]{2}$", "a--b&&", r"[\w-]", r"[^\]]", r"\[[a-z]\]", r"[a\-\-]"])
def test_escaped_characters_of_a_class_are_served(pattern: str) -> None:
    prepare_schema(json.dumps({"type": "string", "pattern": pattern}))


def test_a_part_can_be_referred_to_by_its_name(tiny: Vocabulary) -> None:
    named = {"$id": "https://example.org/a", "$ref": "https://example.org/a#/$defs/b", "$defs": {"b": {"const": 5}}}
    assert admits(tiny, named, "5")
    assert not admits(tiny, named, "6")


def test_property_names_and_constants_are_not_keywords() -> None:
    names = {"minimun": {"const": {"minimun": 1}}, "not": {"enum": [{"if": 2}]}}
    assert prepare_schema(json.dumps({"properties": names})).root == {"properties": names}


@pytest.mark.parametrize(
    ("schema", "with_null"),
    [
        ({"type": "string", "nullable": True}, True),
        ({"type": ["string", "null"], "nullable": True}, True),
        ({"type": "string", "nullable": False}, False),
        ({"type": "string", "enum": ["a"], "nullable": True}, False),
        ({"type": "string", "enum": ["a", None], "nullable": True}, True),
    ],
)
def test_nullable_adds_null_to_the_type(tiny: Vocabulary, schema: object, with_null: bool) -> None:
    assert admits(tiny, schema, '"a"')
    assert admits(tiny, schema, "null") == with_null
