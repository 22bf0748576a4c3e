"""The sources of grammars for llguidance, without the cases of their schemas that it cannot compile."""

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from llguidance import LLMatcher

from services.engine.guided.argument_position import ArgumentMarks, ArgumentPart, ArgumentPosition
from services.engine.guided.argument_texts import Argument, arguments_of
from services.engine.guided.faults import is_unsupported, locate, sentence
from services.engine.guided.schemas.prepared_schema import PreparedSchema, prepare_schema
from services.engine.guided.schemas.rewritten_keywords import with_exclusive_cases
from services.engine.guided.schemas.schema_nodes import InvalidSchema, SchemaNode, UnsupportedSchema
from services.engine.guided.schemas.string_texts import with_ascii_classes
from services.engine.guided.tool_calls import CallableTools, InvalidTool, split_fault, tool_call_grammar, tools_of
from services.wire.requests.argument_texts import ArgumentTexts

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_ANY_OBJECT = {"type": "object"}


class InvalidGrammar(Exception):
    """The grammar cannot be compiled; the message has the reason."""


class GrammarSpec(NamedTuple):
    """Source of a grammar: a field of OutputConstraint, and its text; see `tool_calls.source_of`."""

    kind: str
    text: str = ""


class TokenNames(NamedTuple):
    """Tokens by their names: those that outputs show, and all that no text has. See `tool_calls`."""

    shown: Mapping[str, int]
    hidden: Mapping[str, int]


class GrammarCompiler(Protocol):
    """Compiles grammars."""

    def fault_of(self, grammar: str) -> str:
        """Return llguidance's message on a grammar, empty if it compiles."""

    def matches_nothing(self, grammar: str) -> bool:
        """Return whether a grammar fails, or no text matches it."""


class GrammarSource:
    """The text of one grammar for llguidance, which gets shorter while cases of its schemas are left out."""

    def __init__(self, spec: GrammarSpec, whitespace: str, names: TokenNames, compiler: GrammarCompiler) -> None:
        """Read the source. Raises InvalidGrammar."""
        self._spec = spec
        self._token_names = names
        self._compiler = compiler
        self._fault_of = compiler.fault_of
        # Without `u`, a character has one spelling: llguidance would take `\\u0061` for another key than `a`.
        self._options: JsonCompileOptions = {
            "lenient": False,
            "whitespace_pattern": whitespace,
            "json_allowed_escapes": 'nrbtf\\"',
        }
        self._tools: CallableTools | None = None
        self._arguments: list[list[Argument]] = []  # of each tool, if they are written one by one
        try:
            self._schemas = list(self._prepared())
        except (ValueError, RecursionError) as error:
            raise InvalidGrammar(sentence(str(error))) from error

    @property
    def tagged_start(self) -> ArgumentPosition | None:
        """The position of an empty output if strings have no quotes; None if what is JSON in it has quotes."""
        texts = self._tools.argument_texts if self._tools else None
        if self._tools is None or texts is None or not texts.before_text:
            return None
        part = ArgumentPart.BEGINNING if self._tools.answer else ArgumentPart.TAGS
        return ArgumentPosition(ArgumentMarks.of(texts, [one for tool in self._arguments for one in tool]), part)

    @property
    def omitted(self) -> tuple[str, ...]:
        """What was left out of the schemas, and why."""
        return tuple(f"{self._place(at)}{text}" for at, one in enumerate(self._schemas) for text in one.omitted)

    @property
    def names(self) -> frozenset[bytes] | None:
        """The keys that the schemas list, as they are written; None if none has `patternProperties`."""
        found = [schema.names for schema in self._schemas if schema.names is not None]
        return frozenset[bytes]().union(*found) if found else None

    @property
    def counted(self) -> Iterator[tuple[str, str]]:
        """Grammars of objects with keys that must not run out, and the places of these objects."""
        for at, schema in enumerate(self._schemas):
            yield from ((self._json(json.loads(keys)), f"{self._place(at)}{path}") for keys, path in schema.counted)

    @property
    def text(self) -> str:
        """The grammar without what was left out."""
        return self._grammar(self._roots)

    def omit_faults(self) -> None:
        """Leave out cases until the grammar compiles. Raises InvalidGrammar."""
        try:
            while message := self._fault_of(checked := self._grammar(self._roots, in_json=True)):
                self._omit(message, checked)
            if self._tools and (texts := self._tools.argument_texts):
                self._read_arguments(texts, len(self._tools.names))
        except (InvalidSchema, InvalidTool) as error:
            raise InvalidGrammar(str(error)) from error
        whole = [schema.whole for schema in self._schemas]
        if any(whole) and self._fault_of(
            self._grammar([one or schema.root for one, schema in zip(whole, self._schemas, strict=True)], in_json=True)
        ):
            raise InvalidGrammar(f"{self.omitted[0]}; another case of a oneOf may overlap it")

    def _read_arguments(self, texts: ArgumentTexts, tools: int) -> None:
        """Read the arguments that are written one by one. Raises InvalidTool or InvalidGrammar."""
        for at, schema in enumerate(map(with_exclusive_cases, self._roots[:tools])):
            try:
                self._arguments.append(arguments_of(schema, texts, self._matches_nothing))
            except UnsupportedSchema as error:
                raise InvalidTool(f"{self._place(at)}{error}") from error
        if fault := self._fault_of(self.text):
            raise InvalidGrammar(sentence(fault))
        if texts.before_text and self.names is not None:
            raise InvalidGrammar("patternProperties are not supported beside arguments between tags")

    def _matches_nothing(self, grammar: str) -> bool:
        return self._compiler.matches_nothing(LLMatcher.grammar_from_lark(grammar))

    @property
    def _roots(self) -> list[SchemaNode]:
        return [schema.root for schema in self._schemas]

    def _omit(self, message: str, grammar: str) -> None:
        at, fault = split_fault(message, grammar)
        at, fault = at if self._tools else 0, sentence(fault)
        if self._spec.kind in ("regex", "json_object") or at is None:
            raise InvalidGrammar(fault)
        schema = self._schemas[at]
        place = locate(schema.root, fault, lambda part: sentence(self._fault_of(self._json(part))))
        fault = f"{place.path}: {fault}"
        if not (is_unsupported(fault) and schema.omit(place.cases, place.node, fault)):
            raise InvalidGrammar(f"{self._place(at)}{fault}")

    def _grammar(self, schemas: list[SchemaNode], *, in_json: bool = False) -> str:
        """Return a grammar. `in_json` writes all arguments as objects, so that a fault has its place in a schema."""
        if self._spec.kind == "regex":
            return LLMatcher.grammar_from_regex(with_ascii_classes(self._spec.text))
        if self._tools is None:
            return self._json(schemas[0] if schemas else _ANY_OBJECT)
        schemas = list(map(with_exclusive_cases, schemas))
        # Who gives texts of their own shows the tokens in them.
        names = self._token_names.hidden if self._tools.has_texts else self._token_names.shown
        arguments = None if in_json or self._tools.argument_texts is None else self._arguments
        return LLMatcher.grammar_from_lark(tool_call_grammar(self._tools, schemas, self._options, names, arguments))

    def _json(self, schema: SchemaNode) -> str:
        text = json.dumps(with_exclusive_cases(schema), allow_nan=False)
        return LLMatcher.grammar_from_json_schema(text, overrides=self._options)

    def _prepared(self) -> Iterator[PreparedSchema]:
        if self._spec.kind == "json_schema":
            yield prepare_schema(self._spec.text)
        if self._spec.kind != "tool_calls":
            return
        self._tools = tools_of(self._spec.text)
        for at, text in enumerate(self._tools.schemas):
            try:
                yield prepare_schema(text)
            except ValueError as error:
                raise InvalidTool(f"{self._place(at)}{error}") from error

    def _place(self, at: int) -> str:
        if self._tools is None:
            return ""
        return f"tools[{at}].parameters: " if at < len(self._tools.names) else "answer: "
