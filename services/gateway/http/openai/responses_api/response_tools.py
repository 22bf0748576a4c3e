"""The tools of a request to /v1/responses, as functions that the model is offered, and back in its calls."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from services.gateway.http.openai import requests
from services.gateway.http.openai.responses_api.custom_input import ARGUMENT
from services.gateway.http.openai.responses_api.request_schemas import ResponsesRequest
from services.gateway.http.openai.responses_api.tool_schemas import (
    AllowedTool,
    AllowedTools,
    BuiltInTool,
    CustomTool,
    FunctionTool,
    GrammarFormat,
    NamedChoice,
    NamespaceTool,
)
from services.runtime.errors import InvalidField

_CHOICE = "tool_choice"
_LAST_DOLLAR = re.compile(r"(?<!\\)((?:\\\\)*)\$\Z")


@dataclass(frozen=True)
class DeclaredTool:
    """A tool that a model can call, with its place in the body."""

    path: str
    tool: FunctionTool | CustomTool
    namespace: str | None = None
    about: str = ""  # the description of the namespace

    @property
    def is_custom(self) -> bool:
        """Whether its calls have a text as input."""
        return isinstance(self.tool, CustomTool)

    @property
    def schema_path(self) -> str:
        """The place of what its calls follow."""
        return f"{self.path}.format.definition" if self.is_custom else f"{self.path}.parameters"

    @property
    def model_name(self) -> str:
        """The name for the model."""
        return name_for_model(self.tool.name, self.namespace)

    def as_function(self) -> requests.Tool:
        """Return the function that the model is offered."""
        if isinstance(self.tool, CustomTool):
            function = _of_custom(self.tool)
        else:
            function = {"description": self.tool.description or ""}
            function |= {"parameters": self.tool.parameters, "strict": self.tool.strict}
        function |= {"name": self.model_name, "description": _paragraphs(self.about, function["description"])}
        return requests.Tool.model_validate({"type": "function", "function": function})

    def names(self) -> dict[str, str]:
        """Return the fields that name it in a call."""
        return {"name": self.tool.name} | ({"namespace": self.namespace} if self.namespace else {})


@dataclass(frozen=True)
class ResponseTools:
    """The tools that the model is offered. `choice` is the choice among them in the form of chats."""

    offered: list[DeclaredTool] = field(default_factory=list)
    choice: Any = None
    warnings: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, body: ResponsesRequest) -> "ResponseTools":
        """Read the tools and the choice of a request. Raises InvalidField."""
        declared, choice = list(_declared(body)), body.tool_choice
        warnings = [*_warnings(body, declared)] if choice != "none" else []
        if isinstance(choice, AllowedTools):
            declared, choice = _allowed(choice, declared), choice.mode
        if isinstance(choice, NamedChoice):
            return cls(declared, _named(choice, declared), warnings)
        if choice == "required" and body.tools and not declared:
            raise InvalidField("tool_choice requires a call, but no tool is left: built-in tools are not run", _CHOICE)
        return cls(declared, choice, warnings)

    @property
    def by_name(self) -> Mapping[str, DeclaredTool]:
        """The tools by their names for the model."""
        return {one.model_name: one for one in self.offered}


def name_for_model(name: str, namespace: str | None) -> str:
    """Return the name of a tool for the model, which has no namespaces."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def _declared(body: ResponsesRequest) -> Iterator[DeclaredTool]:
    for at, tool in enumerate(body.tools or ()):
        if isinstance(tool, NamespaceTool):
            for inner_at, inner in enumerate(tool.tools):
                yield DeclaredTool(f"tools[{at}].tools[{inner_at}]", inner, tool.name, tool.description or "")
        elif not isinstance(tool, BuiltInTool):
            yield DeclaredTool(f"tools[{at}]", tool)


def _warnings(body: ResponsesRequest, declared: list[DeclaredTool]) -> Iterator[str]:
    for at, tool in enumerate(body.tools or ()):
        if isinstance(tool, BuiltInTool):
            yield f"tools[{at}] ({tool.type}) is not offered to the model: built-in tools are not run"
    for one in declared:
        given = one.tool.format if isinstance(one.tool, CustomTool) else None
        if isinstance(given, GrammarFormat) and given.syntax == "lark":
            yield f"{one.path}.format has no effect on calls: a lark grammar is only a part of the tool's description"


def _allowed(choice: AllowedTools, declared: list[DeclaredTool]) -> list[DeclaredTool]:
    """Return the tools that a choice allows. Built-in ones are not offered anyway."""
    allowed = set()
    for at, given in enumerate(choice.tools):
        if given.type in ("function", "custom"):
            allowed.add(_find(given, declared, f"tool_choice.tools[{at}]").path)
    return [one for one in declared if one.path in allowed]


def _named(choice: NamedChoice, declared: list[DeclaredTool]) -> requests.NamedTool:
    name = _find(choice, declared, _CHOICE).model_name
    return requests.NamedTool.model_validate({"type": "function", "function": {"name": name}})


def _find(given: NamedChoice | AllowedTool, declared: list[DeclaredTool], path: str) -> DeclaredTool:
    for one in declared:
        if (one.tool.type, one.tool.name, one.namespace) == (given.type, given.name, given.namespace):
            return one
    raise InvalidField(f"{path} names {(given.name or '')[:100]!r}, which is not in tools", path)


def _of_custom(tool: CustomTool) -> dict[str, Any]:
    """Return the function that stands for a custom tool, without its name."""
    text, strict, described = {"type": "string"}, False, tool.description or ""
    if isinstance(tool.format, GrammarFormat):
        grammar = f"Its input follows this {tool.format.syntax} grammar:\n{tool.format.definition}"
        described = _paragraphs(described, grammar)
        if tool.format.syntax == "regex":
            text["pattern"], strict = _whole(tool.format.definition), True
    parameters = {"type": "object", "properties": {ARGUMENT: text}, "required": [ARGUMENT]}
    return {
        "description": described,
        "parameters": parameters | {"additionalProperties": False},
        "strict": strict,
    }


def _paragraphs(*texts: str) -> str:
    return "\n\n".join(filter(None, texts))


def _whole(pattern: str) -> str:
    """Return a pattern that matches whole texts only: a grammar is not searched for."""
    inner = _LAST_DOLLAR.sub(r"\1", pattern.removeprefix("^"))
    return f"^(?:{inner})$"
