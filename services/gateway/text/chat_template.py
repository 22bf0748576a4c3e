"""Conversations into prompts, by the Jinja template that comes with a model."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplateError(ValueError):
    """The model has no chat template, or its template does not accept the conversation."""


class ToolsUnknown(ChatTemplateError):
    """The model's chat template has no place for tools."""


class Conversation(NamedTuple):
    """What a template makes a prompt of, in the words of Hugging Face Transformers.

    `messages`, oldest first, have at least `role` and `content`; `tools` are functions with a JSON schema.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()


class ChatTemplate:
    """A model's chat template, rendered as Hugging Face Transformers renders it.

    `source` is the Jinja text, None for a model without one; `tool_source` is what takes its place where there are
    tools, if the model has a template of its own for them. `special_tokens` are visible to the template under their
    names, such as `bos_token`.
    """

    def __init__(self, source: str | None, special_tokens: Mapping[str, str], tool_source: str | None = None) -> None:
        self._source = source
        self._tool_source = source if tool_source is None else tool_source
        self._special_tokens = dict(special_tokens)

    @property
    def tool_source(self) -> str | None:
        """The Jinja text that conversations with tools are rendered by; None for a model without a template."""
        return self._tool_source

    def render(self, conversation: Conversation, *, open_turn: bool = True) -> str:
        """Return the prompt for a conversation, with the assistant's turn opened or not. Raises ChatTemplateError."""
        if not conversation.messages:
            raise ChatTemplateError("A conversation needs at least one message.")
        if conversation.tools and not self._knows_tools:
            raise ToolsUnknown("The model's chat template knows no tools.")
        template = self._tool_template if conversation.tools else self._template
        try:
            return template.render(
                messages=conversation.messages,
                tools=conversation.tools or None,
                documents=None,
                add_generation_prompt=open_turn,
                **self._special_tokens,
            )
        except ChatTemplateError:
            raise
        except Exception as error:  # a template is a program of the model's author and can fail in any way
            raise ChatTemplateError(f"The chat template does not accept this conversation: {error}") from error

    @cached_property
    def _template(self) -> jinja2.Template:
        """Compiled when first used: a model with a broken template still answers plain text."""
        return _compiled(self._source)

    @cached_property
    def _tool_template(self) -> jinja2.Template:
        return _compiled(self._tool_source)

    @cached_property
    def _knows_tools(self) -> bool:
        """Whether the template, which compiles, looks at `tools` at all."""
        _compiled(self._tool_source)
        return "tools" in meta.find_undeclared_variables(_environment().parse(self._tool_source or ""))


def _compiled(source: str | None) -> jinja2.Template:
    if source is None:
        raise ChatTemplateError("The model has no chat template.")
    try:
        return _environment().from_string(source)
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"The model's chat template is broken: {error}") from error


class _GenerationTag(Extension):
    """Accepts `{% generation %}`, which marks for training what the assistant said; here its body counts as it is."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it as a set of the instance

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> ImmutableSandboxedEnvironment:
    """Speak the dialect of chat templates; in a sandbox, since they come with downloaded models."""
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
    """Unlike Jinja's own filter, leaves the characters special to HTML alone."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
