"""Grammars of outputs, compiled by llguidance for the tokens of one model.

llguidance compiles lazily: most of the work happens when a mask is computed, and the limits below bound it. Beyond
them a state fails, but never the engine. `compile_sandbox` bounds the compilation itself.
"""

from collections.abc import Iterable, Set
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import tokenizers
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine.constraint import ConstraintState
from engine.errors import ConstraintFailed
from services.engine.guided.json_output import DEFAULT_BOUNDS, JsonBounds, JsonPosition, NumberBounds
from services.engine.guided.json_schemas import prepare_schema
from services.engine.guided.text_tokenizer import text_tokenizer
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
_TRIED_TOKENS = 16
_MAX_FAULT_LENGTH = 300
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
        backend = _tokenizer(folder)
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
            place, message = split_fault(self._matcher.get_error())
            raise InvalidGrammar(place + _fault(message))
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
            raise ConstraintFailed(_fault(self._matcher.get_error()))


def _grammar(spec: GrammarSpec, vocabulary: Vocabulary) -> str:
    """Return a grammar in llguidance's form. Raises InvalidGrammar."""
    if spec.kind == "regex":
        return LLMatcher.grammar_from_regex(spec.text)
    options: JsonCompileOptions = {"lenient": False, "whitespace_pattern": vocabulary.whitespace}
    try:
        if spec.kind == "tool_calls":
            source = tool_call_grammar(spec.text, prepare_schema, vocabulary.whitespace, vocabulary.tags)
            return LLMatcher.grammar_from_lark(source)
        schema = prepare_schema(spec.text) if spec.kind == "json_schema" else _ANY_OBJECT
        return LLMatcher.grammar_from_json_schema(schema, overrides=options)
    except (ValueError, RecursionError) as error:
        raise InvalidGrammar(_fault(str(error))) from error


def _shown_names(backend: tokenizers.Tokenizer, hidden: Set[int]) -> dict[str, int]:
    """Return the hidden tokens that are shown in an output: the tags with which some models write calls of tools."""
    added = backend.get_added_tokens_decoder()
    return {token.content: at for at, token in added.items() if at in hidden and not token.special}


def _fault(message: str) -> str:
    """Shorten llguidance's message to one line."""
    _, of_a_pattern, what = message.partition("\nerror: ")  # the rest repeats the pattern several times
    line = " ".join((what.partition("\n")[0] if of_a_pattern else message.replace("<non-verbose/>", "")).split())
    return line if len(line) <= _MAX_FAULT_LENGTH else line[:_MAX_FAULT_LENGTH] + "..."


def _tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """Read a tokenizer; older formats, such as `vocab.json` and `tokenizer.model`, are converted."""
    if (file := folder / "tokenizer.json").is_file():
        return tokenizers.Tokenizer.from_file(str(file))
    from transformers import AutoTokenizer  # takes seconds unless the engine has imported it

    backend: tokenizers.Tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True).backend_tokenizer
    return backend
