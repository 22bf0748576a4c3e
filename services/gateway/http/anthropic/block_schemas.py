"""Schemas of the blocks of content that messages consist of."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, field_validator
from pydantic_core import PydanticCustomError

from services.gateway.http.json_types import Items, Schema
from services.gateway.http.strict_body import StrictBody
from services.runtime.http.validation import UNSUPPORTED, shown

_IGNORED = "Accepted and ignored."


class TextBlock(StrictBody):
    """A text."""

    type: Literal["text"] = Field(description="Type of the block.")
    text: str = Field(description="The text.")
    citations: list[Any] | None = Field(None, description=_IGNORED)
    parsed_output: Any = Field(None, description="Accepted and ignored: Anthropic's client adds it to a text.")


class ThinkingBlock(StrictBody):
    """A thought of the assistant."""

    type: Literal["thinking"] = Field(description="Type of the block.")
    thinking: str = Field(description="The text of the thought.")
    signature: str | None = Field(
        None, description="Has the thought if its text was left out; else ignored: thoughts are not signed."
    )


class RedactedThinkingBlock(StrictBody):
    """A thought of the assistant whose text only its provider can read: it is left out."""

    type: Literal["redacted_thinking"] = Field(description="Type of the block.")
    data: str | None = Field(None, description=_IGNORED)


class CallOrigin(StrictBody):
    """What made a call."""

    type: Literal["direct"] = Field(description="The model.")


class ToolUseBlock(StrictBody):
    """A call of a tool by the assistant."""

    type: Literal["tool_use"] = Field(description="Type of the block.")
    id: str = Field(min_length=1, description="Id of the call.")
    name: str = Field(description="Name of the tool.")
    input: Schema = Field(description="The arguments.")
    caller: CallOrigin | None = Field(None, description="What made the call: the model.")
    toolset_name: None = Field(None, description="Not supported.")


class RefusedType(StrictBody):
    """An object of a type that is not served: always rejected. `refusal` is the reason, with a place for the type."""

    refusal: ClassVar[str]

    type: str = Field(description="Not supported.")

    @field_validator("type", mode="before")
    @classmethod
    def _refuse(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        raise PydanticCustomError(UNSUPPORTED, "{reason}", {"reason": cls.refusal.format(shown(value))})


class OtherBlock(RefusedType):
    """A block of another type: always rejected."""

    refusal: ClassVar = "{} is no text, and Quire's models read text only"


def _tag(block: Any, known: tuple[str, ...]) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    return kind if kind in known else "other"


def _tag_of_content(block: Any) -> str:
    return _tag(block, ("text", "thinking", "redacted_thinking", "tool_use", "tool_result"))


def _tag_of_result(block: Any) -> str:
    return _tag(block, ("text",))


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("text")] | Annotated[OtherBlock, Tag("other")], Discriminator(_tag_of_result)
]


class ToolResultBlock(StrictBody):
    """What a tool returned."""

    type: Literal["tool_result"] = Field(description="Type of the block.")
    tool_use_id: str = Field(description="Id of the call, in the message before.")
    content: str | Items[ResultBlock] | None = Field(
        None, description="The text that the tool returned. Default: none."
    )
    is_error: bool | None = Field(None, description="Whether the tool failed. The model reads `Error:` then.")
    toolset_name: None = Field(None, description="Not supported.")


ContentBlock = Annotated[
    Annotated[TextBlock, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")]
    | Annotated[OtherBlock, Tag("other")],
    Discriminator(_tag_of_content),
]
