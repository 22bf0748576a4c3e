"""Renders conversations as prompts with the Jinja chat template of a model."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Variables that a template gets from the conversation or its environment; special tokens are others.
_OWN_VARIABLES = frozenset(("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"))


class ChatTemplateError(ValueError):
    """The model has no chat template, or its template does not accept the conversation.

    `field` is the path in the chat of the field at fault, empty for the conversation as a whole.
    """

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class Conversation(NamedTuple):
    """The input of a chat template, with the field names of Hugging Face Transformers.

    `messages` are in order, oldest first; each has at least `role` and `content`. `tools` are functions with a JSON
    schema. `variables` are further variables of the template. `open_turn` adds the start of the assistant's turn
    (`add_generation_prompt` in Transformers); `continue_final` leaves the turn of the last message open.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = MappingProxyType({})
    open_turn: bool = True
    continue_final: bool = False


class ChatTemplate:
    """A model's chat template. Renders the same text as Hugging Face Transformers.

    `source` is the Jinja text, None for a model without a template. `tool_source` replaces it for conversations with
    tools, if the model has a separate template for them. `special_tokens` are template variables such as `bos_token`.
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str], tool_source: str | None = None) -> None:
        self._source = source
        self._tool_source = source if tool_source is None else tool_source
        self._special_tokens = dict(special_tokens)

    @property
    def tool_source(self) -> str | None:
        """The Jinja text for conversations with tools; None for a model without a template."""
        return self._tool_source

    def names(self, word: str) -> bool:
        """Return True if the template has the word as a string, such as a role that it compares with."""
        texts = (self._source or "", self._tool_source or "")
        return any(quoted in text for text in texts for quoted in (f"'{word}'", f'"{word}"'))

    def render(self, conversation: Conversation) -> str:
        """Return the prompt for a conversation; ignores `continue_final`. Raises ChatTemplateError."""
        if not conversation.messages:
            raise ChatTemplateError("A conversation must have at least one message.")
        self._check_variables(conversation.variables)
        template = self._tool_template if conversation.tools else self._template
        variables = {
            "documents": None,
            **self._special_tokens,
            **conversation.variables,
            "messages": conversation.messages,
            "tools": conversation.tools or None,
            "add_generation_prompt": conversation.open_turn,
        }
        try:
            return template.render(variables)
        except Exception as error:  # a template is a program and can raise anything
            raise ChatTemplateError(f"The chat template does not accept this conversation: {error}") from error

    def _check_variables(self, variables: Mapping[str, Any]) -> None:
        for name in variables:
            if name in _OWN_VARIABLES or name in self._special_tokens or name in _environment().globals:
                raise ChatTemplateError("The chat template has its own value.", f".template_variables.{name}")

    @cached_property
    def _template(self) -> jinja2.Template:
        # Compiled on first use, so that a model with an invalid template can still complete plain text.
        return _compile(self._source)

    @cached_property
    def _tool_template(self) -> jinja2.Template:
        return _compile(self._tool_source)


def _compile(source: str | None) -> jinja2.Template:
    if source is None:
        raise ChatTemplateError("The model has no chat template.")
    try:
        return _environment().from_string(source)
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"The model's chat template is not valid Jinja: {error}") from error


class _GenerationTag(Extension):
    """Renders the body of `{% generation %}`, a tag that marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it as an instance attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    """Build the environment of Transformers' chat templates, sandboxed because templates are downloaded code."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode as JSON without Jinja's escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
