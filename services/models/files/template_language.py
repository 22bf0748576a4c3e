"""The language of chat templates: Jinja as Hugging Face Transformers configures it, in the immutable sandbox.

Templates come with models and are programs. The sandbox keeps them from Python's objects; it bounds neither their time
nor their memory, so that they are rendered in a process of their own (`services/gateway/text/rendering`). To compile
one evaluates nothing: Jinja would otherwise compute `{{ "a" * 10**10 }}` then.
"""

import json
from datetime import datetime
from functools import cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_SOURCE_CHARACTERS = 128 * 1024
_MAX_REASON = 500


class InvalidTemplate(ValueError):
    """A template that is not Jinja, or too large. The message names the line where that is known."""


def compile_template(source: str) -> jinja2.Template:
    """Compile the text of a template. Raises InvalidTemplate."""
    if len(source) > MAX_SOURCE_CHARACTERS:
        limit = f"at most {MAX_SOURCE_CHARACTERS:,} characters, not {len(source):,}"
        raise InvalidTemplate(f"it must have {limit}")
    try:
        return environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise InvalidTemplate(f"line {error.lineno}: {(error.message or '').rstrip('.')[:_MAX_REASON]}") from error
    except (RecursionError, MemoryError) as error:
        raise InvalidTemplate("it is nested too deeply") from error
    except (SyntaxError, ValueError, OverflowError) as error:  # of the Python code that Jinja makes of it
        raise InvalidTemplate(f"it cannot be compiled: {str(error)[:_MAX_REASON]}") from error


@cache
def environment() -> ImmutableSandboxedEnvironment:
    """Return the environment of chat templates."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols], optimized=False
    )
    made.code_generator_class = _PlainCode
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = _strftime_now
    made.globals["namespace"] = _TemplateNamespace
    return made


class _PlainCode(CodeGenerator):
    """Makes the code of a template without computing the expressions that are constant."""

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: CodeGenerator._FinalizeInfo) -> str:
        if not isinstance(node, nodes.TemplateData | nodes.Const):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _GenerationTag(Extension):
    """Renders the body of `{% generation %}`, a tag that marks the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it as an instance attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _TemplateNamespace(Namespace):
    """Jinja's namespace without names that begin with an underscore, as in transformers."""

    def __init__(*arguments: Any, **named: Any) -> None:  # so that `self` is a name for templates
        self, *others = arguments
        values = dict(*others, **named)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot have the attribute {name[:100]!r}")


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
