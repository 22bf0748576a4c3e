"""Schemas of the tools that a model can call, and of the choice of one."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from services.gateway.http.anthropic.block_schemas import RefusedType
from services.gateway.http.json_types import Items, Schema
from services.gateway.http.strict_body import StrictBody


class ClientTool(StrictBody):
    """A tool of the client, which the model can call."""

    type: Literal["custom"] | None = Field(None, description="Only tools of the client are supported.")
    name: str = Field(description="Name of the tool.")
    description: str | None = Field(None, description="Description of the tool for the model.")
    input_schema: Schema = Field(description="JSON schema of the arguments.")
    input_examples: Items[Schema] | None = Field(
        None, description="Examples of arguments; the model reads them as `examples` of the schema."
    )
    strict: bool | None = Field(
        None, description="Arguments follow the schema. Default: only if a call is required, or beside a format."
    )
    eager_input_streaming: bool | None = Field(None, description="Accepted and ignored: arguments always stream.")
    allowed_callers: Items[Literal["direct"]] | None = Field(None, description="The model is the only caller.")
    defer_loading: Literal[False] | None = Field(None, description="Only false is supported: there is no tool search.")


class OtherTool(RefusedType):
    """A tool that another server runs or describes: always rejected."""

    refusal: ClassVar = "Quire runs no tools and has no schema of {}; send tools with an input_schema"


def _tag(tool: Any) -> str:
    return "custom" if not isinstance(tool, dict) or tool.get("type") in (None, "custom") else "other"


Tool = Annotated[Annotated[ClientTool, Tag("custom")] | Annotated[OtherTool, Tag("other")], Discriminator(_tag)]


class ToolChoice(StrictBody):
    """Whether the model can, must or must not call a tool, or the tool to call."""

    type: Literal["auto", "any", "tool", "none"] = Field(description="`any`: it must call; `tool`: it must call one.")
    name: str | None = Field(None, description="With `tool`: name of a tool in `tools`.")
    disable_parallel_tool_use: bool | None = Field(None, description="If true, at most one call. Default false.")
