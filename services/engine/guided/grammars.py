"""Languages that an output must belong to, compiled by llguidance for the tokens of one model.

It compiles lazily: most of the work is done when a mask is asked for, and bounded by the limits below. What takes more
makes a state fail, never the engine. Compiling itself is bounded by `compile_sandbox`.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import tokenizers
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine.constraint import ConstraintState
from engine.errors import ConstraintFailed
from services.engine.guided.json_output import DEFAULT_BOUNDS, JsonBounds, JsonPosition, NumberBounds
from services.engine.guided.json_schemas import prepared

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_ANY_OBJECT = '{"type":"object"}'
_LIMITS = LLParserLimits(
    initial_lexer_fuel=300_000,
    step_lexer_fuel=50_000,  # some 4 ms
    step_max_items=20_000,
    max_lexer_states=20_000,  # of some 2 kB each
    max_grammar_size=100_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)
_TRIED_TOKENS = 16
_LONGEST_FAULT = 300
_NOTHING = "NoExtensionBias"  # what llguidance calls it when nothing can follow


class InvalidGrammar(Exception):
    """A language that cannot be compiled; the message says why."""


class GrammarSpec(NamedTuple):
    """A language as it was asked for: a field of OutputConstraint, and its text."""

    kind: str
    text: str = ""


class Vocabulary:
    """The tokens of a model, as llguidance wants them, and how JSON is written with them."""

    def __init__(
        self, folder: Path, size: int, eos_token_ids: Iterable[int], bounds: JsonBounds = DEFAULT_BOUNDS
    ) -> None:
        """Read the tokenizer of a model's folder, which takes a second where it is large.

        Raises whatever reading it raises.
        """
        backend = _tokenizer(folder)
        ends = sorted(token for token in eos_token_ids if 0 <= token < size)
        # A token that ends an output must never pass for the text that it is spelled with.
        backend.add_special_tokens([name for token in ends if (name := backend.id_to_token(token)) is not None])
        own_size = backend.get_vocab_size(with_added_tokens=True)
        self.tokens = LLTokenizer(backend.to_str(), n_vocab=max(size, own_size), eos_token=ends or None)
        self.ends = frozenset(ends)
        self.whitespace = bounds.whitespace
        self.numbers = NumberBounds(self.tokens, bounds)
        self._beyond = None if own_size <= size else (1 << size) - 1

    def within(self, mask: bytes) -> bytes:
        """Return a mask without the tokens that the tokenizer has and the model has not; they are never chosen."""
        return mask if self._beyond is None or int.from_bytes(mask, "little") & self._beyond else b""


class CompiledGrammar:
    """An engine.constraint.Constraint."""

    def __init__(self, vocabulary: Vocabulary, language: GrammarSpec) -> None:
        """Compile a language. Raises InvalidGrammar."""
        self._vocabulary = vocabulary
        grammar = _grammar(language, vocabulary.whitespace)
        self._matcher = LLMatcher(vocabulary.tokens, grammar, log_level=0, limits=_LIMITS)
        self._position = None if language.kind == "regex" else JsonPosition()
        try:
            self.start().allowed()
        except ConstraintFailed as failed:
            fault = str(failed)
            raise InvalidGrammar("no output belongs to it" if fault == _NOTHING else fault) from failed

    def start(self) -> ConstraintState:
        """Return the state of an empty output."""
        return _State(self._vocabulary, self._matcher.deep_copy(), self._position)

    def try_out(self) -> None:
        """Follow one output for some tokens: what explodes does it soon. Raises InvalidGrammar."""
        state, ends = self.start(), sum(1 << token for token in self._vocabulary.ends)
        try:
            for _ in range(_TRIED_TOKENS):
                going_on = int.from_bytes(state.allowed(), "little") & ~ends
                if not going_on:
                    return
                state.advance(going_on.bit_length() - 1)
        except ConstraintFailed as failed:
            raise InvalidGrammar(f"it cannot be followed: {failed}") from failed


class _State:
    """An engine.constraint.ConstraintState. `position` is where in JSON it is, None where it is not JSON."""

    def __init__(self, vocabulary: Vocabulary, matcher: LLMatcher, position: JsonPosition | None) -> None:
        self._vocabulary = vocabulary
        self._matcher = matcher
        self._position = position

    @property
    def complete(self) -> bool:
        return self._matcher.is_stopped()

    def allowed(self) -> bytes:
        mask = self._vocabulary.within(self._matcher.compute_bitmask())
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


def _grammar(language: GrammarSpec, whitespace: str) -> str:
    """Write a language as llguidance wants it. Raises InvalidGrammar."""
    if language.kind == "regex":
        return LLMatcher.grammar_from_regex(language.text)
    options: JsonCompileOptions = {"lenient": False, "whitespace_pattern": whitespace}
    try:
        schema = prepared(language.text) if language.kind == "json_schema" else _ANY_OBJECT
        return LLMatcher.grammar_from_json_schema(schema, overrides=options)
    except (ValueError, RecursionError) as error:
        raise InvalidGrammar(_fault(str(error))) from error


def _fault(message: str) -> str:
    """Make one short line of what llguidance says."""
    _, of_a_pattern, what = message.partition("\nerror: ")  # the rest repeats the pattern, several times
    line = " ".join((what.partition("\n")[0] if of_a_pattern else message.replace("<non-verbose/>", "")).split())
    return line if len(line) <= _LONGEST_FAULT else line[:_LONGEST_FAULT] + "..."


def _tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """Read a tokenizer; one in older files, such as `vocab.json` or `tokenizer.model`, is converted."""
    if (file := folder / "tokenizer.json").is_file():
        return tokenizers.Tokenizer.from_file(str(file))
    from transformers import AutoTokenizer  # seconds to import where the engine has not done it yet

    backend: tokenizers.Tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True).backend_tokenizer
    return backend
