"""Schemas of the tools in the body of /v1/responses, and of the choice among them."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator
from pydantic_core import PydanticCustomError

from services.gateway.http.json_types import Items, Schema
from services.gateway.http.strict_body import StrictBody
from services.runtime.http.validation import UNSUPPORTED

BuiltInType = Literal[
    "web_search",
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
    "file_search",
    "code_interpreter",
    "image_generation",
    "computer",
    "computer_use",
    "computer_use_preview",
    "mcp",
    "local_shell",
    "shell",
    "apply_patch",
    "tool_search",
    "programmatic_tool_calling",
]
_CALLERS = "Only `direct`: no program calls tools."
_AT_ONCE = "Accepted and ignored: all tools are offered at once."


class FunctionTool(StrictBody):
    """A function that the model can call."""

    type: Literal["function"] = Field(description="Type of the tool.")
    name: str = Field(description="Name of the function.")
    description: str | None = Field(None, description="Description of the function for the model.")
    parameters: Schema | None = Field(None, description="JSON schema of the arguments. Default: no arguments.")
    strict: bool | None = Field(
        None, description="Arguments follow the schema. Default: only if a call is required, or beside a format."
    )
    allowed_callers: Items[Literal["direct"]] | None = Field(None, description=_CALLERS)
    defer_loading: bool | None = Field(None, description=_AT_ONCE)
    output_schema: None = Field(None, description="Not supported.")
    async_: Literal[False] | None = Field(None, alias="async", description="Only false is supported.")


class PlainFormat(StrictBody):
    """The input of a custom tool is any text."""

    type: Literal["text"] = Field(description="Type of the format.")


class GrammarFormat(StrictBody):
    """The input of a custom tool follows a grammar, which is a part of the tool's description."""

    type: Literal["grammar"] = Field(description="Type of the format.")
    syntax: Literal["lark", "regex"] = Field(description="`regex` is enforced as `strict` is, `lark` is not.")
    definition: str = Field(description="The grammar.")


class CustomTool(StrictBody):
    """A tool whose calls have a text as input, instead of arguments."""

    type: Literal["custom"] = Field(description="Type of the tool.")
    name: str = Field(description="Name of the tool.")
    description: str | None = Field(None, description="Description of the tool for the model.")
    format: Annotated[PlainFormat | GrammarFormat, Discriminator("type")] | None = Field(
        None, description="The format of the input. Default: any text."
    )
    allowed_callers: Items[Literal["direct"]] | None = Field(None, description=_CALLERS)
    defer_loading: bool | None = Field(None, description=_AT_ONCE)
    async_: Literal[False] | None = Field(None, alias="async", description="Only false is supported.")


class NamespaceTool(StrictBody):
    """Tools with a common namespace."""

    type: Literal["namespace"] = Field(description="Type of the tool.")
    name: str = Field(description="Name of the namespace, which the model reads in front of the names of the tools.")
    description: str | None = Field(None, description="Description of the namespace for the model.")
    tools: Items[Annotated[FunctionTool | CustomTool, Discriminator("type")]] = Field(
        description="The tools of the namespace."
    )


class BuiltInTool(BaseModel):
    """A tool that OpenAI runs, or whose form only OpenAI's models know. The model is not offered it."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: BuiltInType = Field(description="Type of the tool.")


# OpenAPI describes them with their types.
ResponseTool = Annotated[FunctionTool | CustomTool | NamespaceTool | BuiltInTool, Discriminator("type")]


class NamedChoice(StrictBody):
    """The tool that the model must call."""

    type: Literal["function", "custom"] = Field(description="Type of the tool.")
    name: str = Field(description="Name of a tool in `tools`.")
    namespace: str | None = Field(None, description="Its namespace.")


class AllowedTool(StrictBody):
    """A tool that the model may call."""

    type: str = Field(description="Type of the tool.")
    name: str | None = Field(None, description="Name of a tool in `tools`.")
    namespace: str | None = Field(None, description="Its namespace.")
    server_label: str | None = Field(None, description="Accepted and ignored: built-in tools are not run.")


class AllowedTools(StrictBody):
    """The tools that the model is offered of those in `tools`."""

    type: Literal["allowed_tools"] = Field(description="Type of the choice.")
    mode: Literal["auto", "required"] = Field(description="Whether the model can or must call one of them.")
    tools: Items[AllowedTool] = Field(description="The tools, by type and name.")


class BuiltInChoice(BaseModel):
    """A built-in tool that the model must call: always rejected."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: BuiltInType = Field(description="Not supported: built-in tools are not run.")

    @field_validator("type", mode="after")
    @classmethod
    def _explain(cls, _: str) -> str:
        raise PydanticCustomError(UNSUPPORTED, "built-in tools are not run")


def _tag(choice: Any) -> str:
    if not isinstance(choice, dict):
        return "mode"
    kind = choice.get("type")
    if kind == "allowed_tools":
        return "allowed"
    return "built-in" if isinstance(kind, str) and kind in BuiltInType.__args__ else "named"  # type: ignore[attr-defined]


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("mode")]
    | Annotated[NamedChoice, Tag("named")]
    | Annotated[AllowedTools, Tag("allowed")]
    | Annotated[BuiltInChoice, Tag("built-in")],
    Discriminator(_tag),
]
