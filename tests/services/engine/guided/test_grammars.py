"""Masks of compiled grammars compared with `re` on all short texts, and invalid grammars."""

import itertools
import json
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jsonschema
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import ConstraintFailed
from services.engine.guided.compile_sandbox import CompileSandbox
from services.engine.guided.grammar_sources import GrammarSpec, InvalidGrammar
from services.engine.guided.grammars import CompiledGrammar, Vocabulary
from services.engine.guided.json_output import JsonBounds, JsonPosition
from tests.tiny_models import VOCABULARY

END = 0
TOKENS = ["<end>", "a", "b", "ab", "ba", "aab"]
SIZE = 9  # of the model, which is padded
MAX_LENGTH = 6
TEXTS = ["".join(letters) for size in range(MAX_LENGTH + 1) for letters in itertools.product("ab", repeat=size)]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def save_tokenizer(folder: Path, tokens: list[str], merges: list[tuple[str, str]]) -> Path:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def letters_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of two letters."""
    return save_tokenizer(tmp_path_factory.mktemp("letters"), TOKENS, [("a", "b"), ("b", "a"), ("a", "ab")])


@pytest.fixture(scope="module")
def letters(letters_folder: Path) -> Vocabulary:
    return Vocabulary(letters_folder, SIZE, [END])


@pytest.fixture(scope="module")
def tiny(tiny_model: Callable[[str], Path]) -> Vocabulary:
    return Vocabulary(tiny_model("llama"), VOCABULARY, [0])


@pytest.fixture(scope="module")
def numerals(tmp_path_factory: pytest.TempPathFactory) -> Callable[[JsonBounds], Vocabulary]:
    """A tokenizer of characters, and of numerals of up to four digits."""
    folder = tmp_path_factory.mktemp("numerals")
    names = ["<end>", "Ġ", *map(chr, range(33, 127)), "12", "34", "1234", "00", "000", "99"]
    merges = [("1", "2"), ("3", "4"), ("12", "34"), ("0", "0"), ("00", "0"), ("9", "9")]
    save_tokenizer(folder, names, merges)
    return lambda bounds: Vocabulary(folder, len(names), [END], bounds)


@pytest.fixture(scope="module")
def sandbox(tiny_model: Callable[[str], Path]) -> Iterator[CompileSandbox]:
    one = CompileSandbox(tiny_model("llama"), VOCABULARY, [0])
    yield one
    one.close()


def tokens_of(mask: bytes) -> set[int]:
    return {8 * place + bit for place, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1}


def admits(language: CompiledGrammar, vocabulary: Vocabulary, text: str) -> bool:
    state = language.start()
    try:
        for token in vocabulary.tokens.tokenize_str(text):
            state.advance(token)
        return END in tokens_of(state.allowed())
    except ConstraintFailed:
        return False


Pattern = tuple[str, int]  # with the length of its longest match


def patterns() -> st.SearchStrategy[Pattern]:
    """Patterns of finite languages, whose possible continuations are known exactly."""
    leaves = st.sampled_from([("a", 1), ("b", 1), ("[ab]", 1), ("(?:)", 0)])

    def grow(inner: st.SearchStrategy[Pattern]) -> st.SearchStrategy[Pattern]:
        return st.one_of(
            st.tuples(inner, inner).map(lambda two: (two[0][0] + two[1][0], two[0][1] + two[1][1])),
            st.tuples(inner, inner).map(lambda two: (f"(?:{two[0][0]}|{two[1][0]})", max(two[0][1], two[1][1]))),
            inner.map(lambda one: (f"(?:{one[0]})?", one[1])),
            inner.map(lambda one: (f"(?:{one[0]}){{1,2}}", 2 * one[1])),
        ).filter(lambda made: made[1] <= MAX_LENGTH)

    return st.recursive(leaves, grow, max_leaves=8)


@settings(max_examples=25, deadline=None)
@given(pattern=patterns())
def test_the_masks_allow_exactly_the_texts_of_the_language(letters: Vocabulary, pattern: Pattern) -> None:
    texts = {text for text in TEXTS if re.fullmatch(pattern[0], text)}
    remaining = [("", CompiledGrammar(letters, GrammarSpec("regex", pattern[0])).start())]
    seen, ended = {""}, set()
    while remaining:
        prefix, state = remaining.pop()
        following = {
            token for token in range(1, len(TOKENS)) if any(text.startswith(prefix + TOKENS[token]) for text in texts)
        }
        chosen = tokens_of(mask := state.allowed()) - {END}
        # A single possible text is limited to the tokens that a tokenizer would produce.
        assert chosen == following or (len(chosen) == 1 and chosen < following)
        if prefix:
            assert state.complete == (not following)
        if END in tokens_of(mask):
            ended.add(prefix)
        for token in chosen:
            after = state.copy()
            after.advance(token)
            if (longer := prefix + TOKENS[token]) not in seen:
                seen.add(longer)
                remaining.append((longer, after))
    assert ended == texts


def test_a_forbidden_token_makes_only_its_state_fail(letters: Vocabulary) -> None:
    language = CompiledGrammar(letters, GrammarSpec("regex", "ab+"))
    state, other = language.start(), language.start()
    with pytest.raises(ConstraintFailed):
        state.advance(2)
    with pytest.raises(ConstraintFailed):
        state.allowed()
    assert tokens_of(other.allowed()) == {3}


def test_tokens_unknown_to_the_model_are_never_allowed(letters_folder: Path) -> None:
    smaller = Vocabulary(letters_folder, 2, [END])
    assert 1 in tokens_of(CompiledGrammar(smaller, GrammarSpec("regex", "a")).start().allowed())
    with pytest.raises(InvalidGrammar, match="no token of the model can follow"):
        CompiledGrammar(smaller, GrammarSpec("regex", "b"))


@pytest.mark.parametrize("pattern", ["a/b", 'a"b\\\\n', "(?i)straße", "^a$", "a\nb", r"\d{4}-\d\d|x", "start: /a/"])
def test_patterns_match_as_in_python(tiny: Vocabulary, pattern: str) -> None:
    language = CompiledGrammar(tiny, GrammarSpec("regex", pattern))
    for text in ("a/b", 'a"b\\n', "STRASSE", "straße", "a", "a\nb", "2024-05", "x", "start: /a/"):
        assert admits(language, tiny, text) == bool(re.fullmatch(pattern, text)), text


@pytest.mark.parametrize(
    "value", [{"name": "Ann", "age": 7}, {"name": "Ann", "age": 100}, {"age": 7, "name": "Ann"}, {"name": "Ann"}, 5]
)
def test_admitted_texts_are_valid_under_the_schema(tiny: Vocabulary, value: object) -> None:
    language = CompiledGrammar(tiny, GrammarSpec("json_schema", json.dumps(PERSON)))
    in_order = not isinstance(value, dict) or list(value) == sorted(value, reverse=True)
    expected = jsonschema.Draft202012Validator(PERSON).is_valid(value) and in_order
    assert admits(language, tiny, json.dumps(value)) == expected


# JSON output


@pytest.mark.parametrize("kind", ["json_schema", "json_object"])
@pytest.mark.parametrize(("blanks", "admitted"), [(0, 1), (1, 3), (2, 4)])
def test_blanks_follow_the_setting(tiny_model: Callable[[str], Path], kind: str, blanks: int, admitted: int) -> None:
    vocabulary = Vocabulary(tiny_model("llama"), VOCABULARY, [0], JsonBounds(blanks=blanks))
    language = CompiledGrammar(vocabulary, GrammarSpec(kind, '{"type": "object"}'))
    texts = ['{"a":[1,2]}', '{"a": [1, 2]}', '{ "a" : [ 1 , 2 ] }', '{\n "a": [1,\t\n2]\r\n}', '{"a":   [1,2]}', " {}"]
    assert [text for text in texts if admits(language, vocabulary, text)] == texts[:admitted]


unbounded = st.sampled_from(
    ['{"type": "number"}', '{"type": "integer"}', '{"type": "array", "items": {"type": "number"}}']
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(schema=unbounded, bounds=st.builds(JsonBounds, st.just(1), *[st.integers(1, 5)] * 3), seed=st.integers(0, 2**32))
def test_numbers_have_at_most_the_digits_of_the_settings(
    numerals: Callable[[JsonBounds], Vocabulary], schema: str, bounds: JsonBounds, seed: int
) -> None:
    vocabulary, source = numerals(bounds), random.Random(seed)
    state, tokens = CompiledGrammar(vocabulary, GrammarSpec("json_schema", schema)).start(), list[int]()
    while (chosen := source.choice(sorted(tokens_of(state.allowed())))) != END and len(tokens) < 200:
        tokens.append(chosen)
        state.advance(chosen)
    found = re.findall(r"(\d+)(?:\.(\d+))?(?:[eE][+-]?(\d+))?", vocabulary.tokens.decode_str(tokens))
    for whole, decimals, exponent in found:
        assert len(whole) <= bounds.integer_digits
        assert len(decimals) <= bounds.decimals
        assert len(exponent) <= bounds.exponent_digits


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"const": 123456789}, "123456789"),
        ({"type": "integer", "minimum": 1234567}, "1234567"),
        ({"type": "number", "minimum": 0.0012, "maximum": 0.0013}, "0.0012"),
        ({"enum": ["123456789", 5]}, '"123456789"'),
        ({"type": "object"}, '{"12345678":"1234567"}'),
    ],
)
def test_the_schemas_own_digits_and_strings_are_not_bounded(
    numerals: Callable[[JsonBounds], Vocabulary], schema: object, text: str
) -> None:
    vocabulary = numerals(JsonBounds(1, 2, 2, 1))
    language = CompiledGrammar(vocabulary, GrammarSpec("json_schema", json.dumps(schema)))
    state = language.start()
    while text:
        spelled = {vocabulary.tokens.decode_str([token]): token for token in tokens_of(state.allowed()) - {END}}
        chosen = max((one for one in spelled if text.startswith(one)), key=len)
        state.advance(spelled[chosen])
        text = text[len(chosen) :]
    assert END in tokens_of(state.allowed())


@settings(max_examples=50)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    ),
    st.integers(1, 5),
)
def test_the_json_position_does_not_depend_on_the_size_of_pieces(value: object, size: int) -> None:
    text, position = json.dumps(value, ensure_ascii=False).encode(), JsonPosition()
    for start in range(0, len(text), size):
        position = position.after(text[start : start + size])
    assert position == JsonPosition().after(text)
    last = re.search(rb"(\d*)$", text)
    assert last is not None
    assert position.digits == (len(last[1]) if isinstance(value, int | float) and not isinstance(value, bool) else 0)


# The sandbox

FINE = [
    ("regex", "[a-z]+"),
    ("regex", "(a|aa)*b{5000}"),
    ("json_object", ""),
    ("json_schema", "true"),
    ("json_schema", json.dumps(PERSON)),
    ("json_schema", r'{"description": "cut \ud83d", "properties": {"\ud83d\ude00": {"const": "\ud83d\ude00"}}}'),
]
FAULTY = [
    ("regex", "(x{1000}){1000}{1000}", ""),
    ("regex", "a?" * 8000, "too much time or memory"),
    ("regex", "(" * 30000, "unclosed group"),
    ("regex", "(?=a)b", "look-around"),
    ("regex", "a^b", "^ is supported only at the start of a pattern"),
    ("regex", "a$b", "$ is supported only at the end of a pattern"),
    ("regex", r"\bx", r"word boundaries, such as \b, are not supported"),
    ("regex", "[a&&b]", "no output matches it"),
    ("json_schema", "{", "Expecting property name"),
    ("json_schema", "[" * 60000, "recursion"),
    ("json_schema", '{"not":' * 9000 + "{}" + "}" * 9000, "recursion"),
    ("json_schema", "5", "an object or a boolean"),
    ("json_schema", "false", "no output matches it"),
    ("json_schema", '{"$ref": "#"}', "no output matches it"),
    ("json_schema", '{"items": {"type": "objekt"}}', "#/items/type must be one or several of array, boolean, integer"),
    ("json_schema", '{"type": 5}', "object, string, not 5"),
    ("json_schema", '{"enum": []}', "#/enum must have at least one entry"),
    ("json_schema", '{"properties": {"a": {"const": 9007199254740993}}}', "#/properties/a/const is 9007199254740993"),
    ("json_schema", r'{"const": "\ud800"}', "#/const has U+D800, a half of a surrogate pair"),
    ("json_schema", r'{"anyOf": [{"enum": [{"a": ["x\udc00"]}]}]}', "#/anyOf/0/enum/0/a/0 has U+DC00"),
    ("json_schema", r'{"properties": {"\ud800": {}}}', "#/properties has U+D800"),
    ("json_schema", r'{"\ud800": 1}', "# has U+D800"),
    ("json_schema", r'{"required": ["\ud800"]}', "#/required/0 has U+D800"),
    ("json_schema", r'{"patternProperties": {"\ud800": {"const": "\u0001"}}}', "#/patternProperties has U+D800"),
    ("json_schema", '{"minimun": 3}', "#/minimun: minimun is not a JSON schema keyword"),
    ("json_schema", '{"uniqueItems": true}', "uniqueItems"),
    ("json_schema", '{"x-guidance": {"lenient": true}, "uniqueItems": true}', "x-guidance"),
    ("json_schema", '{"$ref": "file:///etc/passwd"}', '#/$ref is "file:///etc/passwd", which is not in'),
    ("json_schema", json.dumps({"pattern": "(?=a)b", "type": "string"}), "look-around"),
    (
        "json_schema",
        json.dumps({"allOf": [{"type": "string", "pattern": f".*{n}.*"} for n in range(100)]}),
        "too much time or memory",
    ),
    (
        "json_schema",
        json.dumps({"anyOf": [{"type": "integer", "multipleOf": 90000 - n} for n in range(500)]}),
        "too much time or memory",
    ),
]


@pytest.mark.parametrize(("kind", "text"), FINE)
def test_a_good_grammar_passes_the_sandbox(sandbox: CompileSandbox, tiny: Vocabulary, kind: str, text: str) -> None:
    assert sandbox.fault(GrammarSpec(kind, text)) == ""
    CompiledGrammar(tiny, GrammarSpec(kind, text))


@pytest.mark.parametrize(("kind", "text", "fault"), FAULTY, ids=[f"{text[:20]} {fault}" for _, text, fault in FAULTY])
def test_a_bad_grammar_is_reported_in_bounded_time_and_in_one_line(
    sandbox: CompileSandbox, kind: str, text: str, fault: str
) -> None:
    begun = time.monotonic()
    message = sandbox.fault(GrammarSpec(kind, text))
    assert fault in message
    assert 0 < len(message) < 400
    assert "\n" not in message
    assert time.monotonic() - begun < 60, "compilation stops after 10 seconds"


def test_a_closed_sandbox_ends_its_process_and_starts_another_on_demand(sandbox: CompileSandbox) -> None:
    assert sandbox.fault(GrammarSpec("regex", "a")) == ""
    before = sandbox._process
    assert before is not None
    sandbox.close()
    assert before.poll() is not None
    assert sandbox.fault(GrammarSpec("regex", "a")) == ""
