"""Schemas of the items in the input of /v1/responses.

Clients copy items of earlier responses, with their ids and statuses, which have no effect.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator
from pydantic_core import PydanticCustomError

from services.gateway.http.json_types import Items, Schema
from services.gateway.http.strict_body import StrictBody
from services.runtime.http.validation import EXPECTED, UNSUPPORTED

_IGNORED = "Accepted and ignored."
_IGNORED_ITEM_FIELD = "Accepted and ignored: items of a response are accepted as input."
_ITEM_TYPES = (
    "message",
    "function_call",
    "function_call_output",
    "custom_tool_call",
    "custom_tool_call_output",
    "local_shell_call",
    "local_shell_call_output",
    "web_search_call",
    "reasoning",
)
# By type of other items.
_REASONS = {
    "item_reference": "responses are not stored, because gateways share no state; send the item itself, which clients"
    " do if `store` is false",
    "compaction": "Quire compacts no conversations, and those that other servers compacted are encrypted",
}


class InputText(StrictBody):
    """A text of a message. Images, audio and files are not supported."""

    image_url: None = Field(None, description="Not supported: models read text only.")
    type: Literal["input_text", "output_text"] = Field(description="`input_text`, or `output_text` of the assistant.")
    text: str = Field(description="The text.")
    annotations: list[Any] | None = Field(None, description=_IGNORED)
    logprobs: list[Any] | None = Field(None, description=_IGNORED)
    parsed: Any = Field(None, description="Accepted and ignored: OpenAI's client sends it.")
    prompt_cache_breakpoint: Any = Field(None, description="Accepted and ignored: prefix caching is automatic.")

    @field_validator("image_url", mode="before")
    @classmethod
    def _refuse_image(cls, value: Any) -> Any:
        """Refuse an image as OpenAI does where a model reads none: Codex then leaves the images out and repeats."""
        if value is None:
            return value
        raise PydanticCustomError(EXPECTED, "left out, because the model reads text only")


class CopiedItem(StrictBody):
    """What items of all types have."""

    id: str | None = Field(None, description="Id of the item, which no other item of the input has.")
    status: str | None = Field(None, description=_IGNORED_ITEM_FIELD)
    internal_chat_message_metadata_passthrough: Any = Field(
        None, description="Accepted and ignored: Codex keeps its own notes in it."
    )


class DirectCaller(StrictBody):
    """The model calls the tool itself."""

    type: Literal["direct"] = Field(description="No program calls tools.")


class InputMessage(CopiedItem):
    """A message of the conversation."""

    type: Literal["message"] | None = Field("message", description="Type of the item.")
    role: Literal["user", "assistant", "system", "developer"] = Field(
        description="Author of the message; `developer` is `system` for a chat template without that role."
    )
    content: str | Items[InputText] = Field(description="The text of the message.")
    phase: str | None = Field(None, description=_IGNORED_ITEM_FIELD)
    end_turn: bool | None = Field(None, description=_IGNORED_ITEM_FIELD)


class InputCall(CopiedItem):
    """What calls of tools have."""

    name: str = Field(description="Name of the tool.")
    call_id: str = Field(min_length=1, description="Id of the call, for its output.")
    namespace: str | None = Field(None, description="Namespace of the tool.")
    caller: DirectCaller | None = Field(None, description="Accepted and ignored.")


class InputFunctionCall(InputCall):
    """A function call of the assistant."""

    type: Literal["function_call"] = Field(description="Type of the item.")
    arguments: str = Field(description="The arguments, a JSON object as text.")
    parsed_arguments: Any = Field(None, description="Accepted and ignored: OpenAI's client sends it.")


class InputCustomCall(InputCall):
    """A call of a custom tool by the assistant."""

    type: Literal["custom_tool_call"] = Field(description="Type of the item.")
    input: str = Field(description="The input of the tool.")


class InputCallResult(CopiedItem):
    """The output of a call."""

    type: Literal["function_call_output", "custom_tool_call_output"] = Field(description="Type of the item.")
    call_id: str = Field(min_length=1, description="Id of an earlier call.")
    output: str | Items[InputText] = Field(description="The text that the tool returned.")
    name: str | None = Field(None, description=_IGNORED_ITEM_FIELD)
    namespace: str | None = Field(None, description=_IGNORED_ITEM_FIELD)
    caller: DirectCaller | None = Field(None, description=_IGNORED_ITEM_FIELD)


class InputShellCall(CopiedItem):
    """A command that the assistant ran in the client's shell: a call of the tool `local_shell`."""

    type: Literal["local_shell_call"] = Field(description="Type of the item.")
    action: Schema = Field(description="The command, the arguments of the call.")
    call_id: str | None = Field(None, description="Id of the call, for its output. Default: `id`.")


class InputShellResult(StrictBody):
    """The output of a command."""

    type: Literal["local_shell_call_output"] = Field(description="Type of the item.")
    id: str = Field(description="`call_id` of an earlier `local_shell_call`, if `call_id` is left out.")
    call_id: str | None = Field(None, description="Id of an earlier `local_shell_call`.")
    output: str = Field(description="The output.")
    status: str | None = Field(None, description=_IGNORED_ITEM_FIELD)


class InputSearch(BaseModel):
    """A search in the web that another server made. It is left out: what it found is not in it."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["web_search_call"] = Field(description="Type of the item.")
    id: str | None = Field(None, description=_IGNORED_ITEM_FIELD)


class ReasoningText(StrictBody):
    """A text of a thought."""

    type: Literal["reasoning_text", "text"] = Field(description="Type of the part.")
    text: str = Field(description="The text.")


class InputReasoning(CopiedItem):
    """A thought of the assistant in front of its next message or call."""

    type: Literal["reasoning"] = Field(description="Type of the item.")
    content: Items[ReasoningText] | None = Field(None, description="The text of the thought.")
    summary: list[Any] | None = Field(None, description=_IGNORED)
    encrypted_content: str | None = Field(
        None, description="Without `content`: the text, if a response of Quire had it. That of others is ignored."
    )


class UnsupportedItem(StrictBody):
    """An item of another type: always rejected."""

    type: Literal[_ITEM_TYPES] = Field(description="Other types are not supported.")  # type: ignore[valid-type]

    @field_validator("type", mode="before")
    @classmethod
    def _explain(cls, kind: Any) -> Any:
        if isinstance(kind, str) and kind in _REASONS:
            raise PydanticCustomError(UNSUPPORTED, _REASONS[kind])
        return kind


def _tag(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else None
    if kind is None:
        return "message"
    if kind in ("function_call_output", "custom_tool_call_output"):
        return "result"
    return kind if kind in _ITEM_TYPES else "unsupported"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputFunctionCall, Tag("function_call")]
    | Annotated[InputCustomCall, Tag("custom_tool_call")]
    | Annotated[InputCallResult, Tag("result")]
    | Annotated[InputShellCall, Tag("local_shell_call")]
    | Annotated[InputShellResult, Tag("local_shell_call_output")]
    | Annotated[InputSearch, Tag("web_search_call")]
    | Annotated[InputReasoning, Tag("reasoning")]
    | Annotated[UnsupportedItem, Tag("unsupported")],
    Discriminator(_tag),
]
