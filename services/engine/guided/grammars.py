"""Grammars of outputs, compiled by llguidance for the tokens of one model.

llguidance compiles lazily: most of the work happens when a mask is computed, and the limits below bound it. Beyond
them a state fails, but never the engine. `compile_sandbox` bounds the compilation itself.
"""

import json
import re
from collections.abc import Iterable, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import tokenizers
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine.constraint import ConstraintState
from engine.errors import ConstraintFailed
from services.engine.guided.faults import locate, sentence
from services.engine.guided.json_output import DEFAULT_BOUNDS, JsonBounds, JsonPosition, NumberBounds
from services.engine.guided.json_schemas import prepare_schema
from services.engine.guided.text_tokenizer import read_tokenizer, text_tokenizer
from services.engine.guided.tool_calls import split_fault, tool_call_grammar
from services.models.tokenizer_settings import named_tokens, tokenizer_settings

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_ANY_OBJECT = '{"type":"object"}'
_LIMITS = LLParserLimits(
    initial_lexer_fuel=300_000,
    step_lexer_fuel=50_000,  # about 4 ms
    step_max_items=20_000,
    max_lexer_states=20_000,  # about 2 kB each
    max_grammar_size=100_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_ASCII_CLASSES = {r"\d": "[0-9]", r"\D": "[^0-9]", r"\w": "[0-9A-Za-z_]", r"\W": "[^0-9A-Za-z_]"}
_TRIED_TOKENS = 16
_NO_CONTINUATION = "NoExtensionBias"  # llguidance's error if no token can follow


class InvalidGrammar(Exception):
    """The grammar cannot be compiled; the message has the reason."""


class GrammarSpec(NamedTuple):
    """Source of a grammar: a field of OutputConstraint, and its text; see `tool_calls.source_of`."""

    kind: str
    text: str = ""


class Vocabulary:
    """A model's tokens in llguidance's form, and the bounds of JSON written with them."""

    def __init__(
        self, folder: Path, size: int, eos_token_ids: Iterable[int], bounds: JsonBounds = DEFAULT_BOUNDS
    ) -> None:
        """Read the tokenizer of a model's folder, which takes a second for large vocabularies.

        Raises the errors of `tokenizers`, llguidance and transformers.
        """
        backend = read_tokenizer(folder)
        ends = sorted(token for token in eos_token_ids if 0 <= token < size)
        named = [backend.token_to_id(name) for name in named_tokens(tokenizer_settings(folder)).values()]
        copy = text_tokenizer(backend, {token for token in (*ends, *named) if token is not None})
        own_size = backend.get_vocab_size(with_added_tokens=True)
        # Without the model's own, llguidance would let token 0 end an output, which may be text.
        endings = ends or sorted(copy.hidden)[:1] or None
        self.tokens = LLTokenizer(copy.source, n_vocab=max(size, own_size), eos_token=endings)
        if not all(map(self.tokens.is_special_token, copy.hidden)):
            raise ValueError("the tokenizer's special tokens cannot be told from text")
        self.eos_token_ids = frozenset(ends)
        self.tags = _shown_names(backend, copy.hidden - self.eos_token_ids)
        self.whitespace = bounds.whitespace
        self.numbers = NumberBounds(self.tokens, bounds)
        self._model_tokens = None if own_size <= size else (1 << size) - 1

    def usable(self, mask: bytes) -> bytes:
        """Return the mask, or an empty one if it allows only tokens that the model does not have."""
        return mask if self._model_tokens is None or int.from_bytes(mask, "little") & self._model_tokens else b""


class CompiledGrammar:
    """Implements engine.constraint.Constraint."""

    def __init__(self, vocabulary: Vocabulary, spec: GrammarSpec) -> None:
        """Compile a grammar. Raises InvalidGrammar."""
        self._vocabulary = vocabulary
        grammar = _grammar(spec, vocabulary)
        self._matcher = LLMatcher(vocabulary.tokens, grammar, log_level=0, limits=_LIMITS)
        self._position = None if spec.kind == "regex" else JsonPosition()
        if self._matcher.is_error():
            raise InvalidGrammar(_explained(self._matcher.get_error(), spec, vocabulary))
        try:
            self.start().allowed()
        except ConstraintFailed as failed:
            fault = str(failed)
            raise InvalidGrammar("no output matches it" if fault == _NO_CONTINUATION else fault) from failed

    def start(self) -> ConstraintState:
        """Return the state of an empty output."""
        return _State(self._vocabulary, self._matcher.deep_copy(), self._position)

    def probe(self) -> None:
        """Follow one output for some tokens, because expensive grammars show it early. Raises InvalidGrammar."""
        state, ends = self.start(), sum(1 << token for token in self._vocabulary.eos_token_ids)
        try:
            for _ in range(_TRIED_TOKENS):
                going_on = int.from_bytes(state.allowed(), "little") & ~ends
                if not going_on:
                    return
                state.advance(going_on.bit_length() - 1)
        except ConstraintFailed as failed:
            raise InvalidGrammar(f"it cannot be evaluated: {failed}") from failed


class _State:
    """Implements engine.constraint.ConstraintState. `position` is the position in JSON, None for other grammars."""

    def __init__(self, vocabulary: Vocabulary, matcher: LLMatcher, position: JsonPosition | None) -> None:
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._position = position

    @property
    def complete(self) -> bool:
        return self._matcher.is_stopped()

    def allowed(self) -> bytes:
        mask = self._vocabulary.usable(self._matcher.compute_bitmask())
        self._check()
        if not any(mask):
            raise ConstraintFailed("no token of the model can follow")
        return mask if self._position is None else self._vocabulary.numbers.bounded(self._position, mask)

    def advance(self, token_id: int) -> None:
        if not self._matcher.consume_token(token_id):
            self._check()
            raise ConstraintFailed(f"token {token_id} cannot follow")
        if self._position is not None:
            self._position = self._vocabulary.numbers.after(self._position, token_id)

    def copy(self) -> "_State":
        return _State(self._vocabulary, self._matcher.deep_copy(), self._position)

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConstraintFailed(sentence(self._matcher.get_error()))


def _grammar(spec: GrammarSpec, vocabulary: Vocabulary) -> str:
    """Return a grammar in llguidance's form. Raises InvalidGrammar."""
    if spec.kind == "regex":
        return LLMatcher.grammar_from_regex(with_ascii_classes(spec.text))
    try:
        if spec.kind == "tool_calls":
            source = tool_call_grammar(spec.text, prepare_schema, vocabulary.whitespace, vocabulary.tags)
            return LLMatcher.grammar_from_lark(source)
        schema = prepare_schema(spec.text) if spec.kind == "json_schema" else _ANY_OBJECT
        return _schema_grammar(schema, vocabulary)
    except (ValueError, RecursionError) as error:
        raise InvalidGrammar(sentence(str(error))) from error


def _schema_grammar(schema: str, vocabulary: Vocabulary) -> str:
    options: JsonCompileOptions = {"lenient": False, "whitespace_pattern": vocabulary.whitespace}
    return LLMatcher.grammar_from_json_schema(schema, overrides=options)


def with_ascii_classes(pattern: str) -> str:
    r"""Return a pattern whose \d and \w are ASCII, as in the patterns of JSON schemas; \s is Unicode's in both."""
    return _ESCAPE.sub(lambda escape: _ASCII_CLASSES.get(escape[0], escape[0]), pattern)


def _explained(message: str, spec: GrammarSpec, vocabulary: Vocabulary) -> str:
    """Return the reason why a grammar does not compile, with its place in the schema or the tools."""
    at, message = split_fault(message)
    fault = sentence(message)
    if spec.kind == "json_schema":
        schema, place = spec.text, ""
    elif spec.kind == "tool_calls" and at is not None:
        schema, place = json.loads(spec.text)[1][at][1], f"tools[{at}].parameters: "
    else:
        return fault

    def fault_of(part: dict[str, Any]) -> str:
        grammar = _schema_grammar(json.dumps(part), vocabulary)
        matcher = LLMatcher(vocabulary.tokens, grammar, log_level=0, limits=_LIMITS)
        return sentence(matcher.get_error()) if matcher.is_error() else ""

    return f"{place}{locate(json.loads(prepare_schema(schema)), fault, fault_of)}: {fault}"


def _shown_names(backend: tokenizers.Tokenizer, hidden: Set[int]) -> dict[str, int]:
    """Return the hidden tokens that are shown in an output: the tags with which some models write calls of tools."""
    added = backend.get_added_tokens_decoder()
    return {token.content: at for at, token in added.items() if at in hidden and not token.special}
