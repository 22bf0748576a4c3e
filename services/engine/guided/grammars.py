"""Grammars of outputs, compiled by llguidance for the tokens of one model.

llguidance compiles lazily: most of the work happens when a mask is computed, and the limits below bound it. Beyond
them a state fails, but never the engine. `compile_sandbox` bounds the compilation itself.
"""

from collections.abc import Iterable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import tokenizers
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine.constraint import ConstraintState
from engine.errors import ConstraintFailed
from services.engine.guided.argument_position import ArgumentPosition
from services.engine.guided.distinct_keys import DistinctKeys, KeyStart, KeyTracker
from services.engine.guided.faults import sentence
from services.engine.guided.grammar_sources import GrammarSource, GrammarSpec, InvalidGrammar, TokenNames
from services.engine.guided.json_output import DEFAULT_BOUNDS, JsonBounds, JsonPosition, NumberBounds
from services.engine.guided.text_tokenizer import text_tokenizer
from services.engine.guided.tool_calls import END_OF_SEQUENCE
from services.models.files.tokenizer_loading import load_tokenizer

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
_TRIED_KEYS = 512  # tokens
_NO_CONTINUATION = "NoExtensionBias"  # llguidance's error if no token can follow


class Vocabulary:
    """A model's tokens in llguidance's form, and the bounds of JSON written with them."""

    def __init__(
        self, folder: Path, size: int, eos_token_ids: Iterable[int], bounds: JsonBounds = DEFAULT_BOUNDS
    ) -> None:
        """Read the tokenizer of a model's folder, which takes a second for large vocabularies.

        Raises InvalidTokenizer, and the errors of `tokenizers` and llguidance.
        """
        backend, roles, _ = load_tokenizer(folder)
        ends = sorted(token for token in eos_token_ids if 0 <= token < size)
        named = [backend.token_to_id(name) for name in roles.values()]
        copy = text_tokenizer(backend, {token for token in (*ends, *named) if token is not None})
        own_size = backend.get_vocab_size(with_added_tokens=True)
        # Without the model's own, llguidance would let token 0 end an output, which may be text.
        endings = ends or sorted(copy.hidden)[:1] or None
        self.tokens = LLTokenizer(copy.source, n_vocab=max(size, own_size), eos_token=endings)
        if not all(map(self.tokens.is_special_token, copy.hidden)):
            raise ValueError("the tokenizer's special tokens cannot be told from text")
        self.size = size
        self.eos_token_ids = frozenset(ends)
        self.tags = _shown_names(backend, copy.hidden - self.eos_token_ids)
        self.marks = _hidden_names(backend, copy.hidden, self.eos_token_ids)
        self.mark_texts = {at: name.encode() for name, at in self.marks.items() if at != END_OF_SEQUENCE}
        self.whitespace = bounds.whitespace
        self.numbers = NumberBounds(self.tokens, bounds)
        self.keys = DistinctKeys(self.tokens)
        self._model_tokens = None if own_size <= size else (1 << size) - 1

    def matcher(self, grammar: str) -> LLMatcher:
        """Compile a grammar in llguidance's form; the matcher has the fault if there is one."""
        return LLMatcher(self.tokens, grammar, log_level=0, limits=_LIMITS)

    def fault_of(self, grammar: str) -> str:
        """Return llguidance's message on a grammar, empty if it compiles."""
        matcher = self.matcher(grammar)
        return matcher.get_error() if matcher.is_error() else ""

    def matches_nothing(self, grammar: str) -> bool:
        """Return whether a grammar fails, or no text matches it."""
        matcher = self.matcher(grammar)
        return matcher.is_error() or not any(matcher.compute_bitmask()) or matcher.is_error()

    def usable(self, mask: bytes) -> bytes:
        """Return the mask, or an empty one if it allows only tokens that the model does not have."""
        return mask if self._model_tokens is None or int.from_bytes(mask, "little") & self._model_tokens else b""


class CompiledGrammar:
    """Implements engine.constraint.Constraint."""

    def __init__(self, vocabulary: Vocabulary, spec: GrammarSpec) -> None:
        """Compile a grammar. Raises InvalidGrammar."""
        self._vocabulary = vocabulary
        token_names = TokenNames(vocabulary.tags, vocabulary.marks)
        source = GrammarSource(spec, vocabulary.whitespace, token_names, vocabulary)
        source.omit_faults()
        self.omitted = source.omitted
        for keys, path in source.counted:
            self._check_keys(keys, path)
        self._matcher = vocabulary.matcher(source.text)
        self._health = _Health()
        self._json = None
        if spec.kind != "regex":
            names = source.names
            tracker = None if names is None else KeyTracker(vocabulary.tokens, vocabulary.keys, names)
            self._json = _JsonState(vocabulary, tracker, arguments=source.tagged_start)
        try:
            self.start().allowed()
        except ConstraintFailed as failed:
            fault = "no output matches it" if str(failed) == _NO_CONTINUATION else str(failed)
            raise InvalidGrammar(f"#: {fault}" if spec.kind == "json_schema" else fault) from failed

    def _check_keys(self, keys: str, path: str) -> None:
        """Write an object's keys, because those of patterns may run out. Raises InvalidGrammar if they do."""
        vocabulary = self._vocabulary
        tracker = KeyTracker(vocabulary.tokens, vocabulary.keys, frozenset())
        state = _State(vocabulary, vocabulary.matcher(keys), _JsonState(vocabulary, tracker), _Health())
        try:
            for _ in range(_TRIED_KEYS):
                mask = state.allowed()
                if state.complete:
                    return
                state.advance(vocabulary.keys.shortest(mask))
        except ConstraintFailed as failed:
            few = "needs more keys than its patternProperties have"
            raise InvalidGrammar(f"{path}/minProperties {few}") from failed

    def start(self) -> ConstraintState:
        """Return the state of an empty output."""
        return _State(self._vocabulary, self._matcher.deep_copy(), self._json, self._health)

    @property
    def is_exhausted(self) -> bool:
        """Whether an output has exceeded a limit: all outputs share what counts towards it."""
        return self._health.is_exhausted

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


class _JsonState(NamedTuple):
    """Where in JSON an output ends, and what that forbids beyond its grammar.

    `tracker` if keys may be dead, `arguments` if strings without quotes may stand beside JSON.
    """

    vocabulary: Vocabulary
    tracker: KeyTracker | None
    position: JsonPosition = JsonPosition()
    start: KeyStart | None = None
    arguments: ArgumentPosition | None = None

    def allowed(self, mask: bytes) -> bytes:
        """Return what is left of the grammar's mask. Raises ConstraintFailed if nothing is."""
        bounded = self.vocabulary.numbers.bounded(self.position, mask)
        left = self.vocabulary.keys.distinct(self.position, bounded)
        if not any(left):
            raise ConstraintFailed("only keys that the object already has could follow")
        return left

    def after(self, before: LLMatcher, token_id: int) -> "_JsonState":
        """Return the state after a token. `before` is the matcher in front of it."""
        text = self.vocabulary.keys.text(token_id)
        if self.arguments is not None:
            arguments = self.arguments.after(self.vocabulary.mark_texts.get(token_id, text))
            return self._replace(arguments=arguments, position=arguments.json)
        if self.tracker is None:
            return self._replace(position=self.position.after(text))
        position, start = self.tracker.after(self.position, self.start, before, text)
        return self._replace(position=position, start=start)


@dataclass
class _Health:
    """What the outputs of one grammar share."""

    is_exhausted: bool = False


class _State:
    """Implements engine.constraint.ConstraintState. `json` is None for other grammars than JSON's."""

    def __init__(
        self, vocabulary: Vocabulary, matcher: LLMatcher, json_state: _JsonState | None, health: _Health
    ) -> None:
        self._vocabulary = vocabulary
        self._health = health
        self._matcher = matcher
        self._json = json_state

    @property
    def complete(self) -> bool:
        return self._matcher.is_stopped()

    def allowed(self) -> bytes:
        mask = self._vocabulary.usable(self._matcher.compute_bitmask())
        self._check()
        if not any(mask):
            raise ConstraintFailed("no token of the model can follow")
        return mask if self._json is None else self._json.allowed(mask)

    def advance(self, token_id: int) -> None:
        before = self._matcher.deep_copy()
        if not self._matcher.consume_token(token_id):
            self._check()
            raise ConstraintFailed(f"token {token_id} cannot follow")
        if self._json is not None:
            self._json = self._json.after(before, token_id)

    def copy(self) -> "_State":
        return _State(self._vocabulary, self._matcher.deep_copy(), self._json, self._health)

    def _check(self) -> None:
        if self._matcher.is_error():
            self._health.is_exhausted = True
            raise ConstraintFailed(sentence(self._matcher.get_error()))


def _shown_names(backend: tokenizers.Tokenizer, hidden: Set[int]) -> dict[str, int]:
    """Return the hidden tokens that are shown in an output: the tags with which some models write calls of tools."""
    added = backend.get_added_tokens_decoder()
    return {token.content: at for at, token in added.items() if at in hidden and not token.special}


def _hidden_names(backend: tokenizers.Tokenizer, hidden: Set[int], ends: Set[int]) -> dict[str, int]:
    """Return the hidden tokens by their names: some models write calls of tools with them."""
    added = backend.get_added_tokens_decoder()
    return {token.content: END_OF_SEQUENCE if at in ends else at for at, token in added.items() if at in hidden}
