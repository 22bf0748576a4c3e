"""Schemas of the bodies of /v1/messages: Anthropic's fields, and those that chats have besides.

Unknown fields are rejected by name. Fields of Anthropic's that would change the answer and are not served accept only
null, or the value that Quire has anyway, and have a reason.
"""

from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from services.gateway.http.anthropic.block_schemas import ContentBlock, TextBlock
from services.gateway.http.anthropic.tool_schemas import Tool, ToolChoice
from services.gateway.http.json_types import Int32, Items, Schema
from services.gateway.http.openai import requests
from services.gateway.http.strict_body import StrictBody
from services.runtime.http.validation import UNSUPPORTED

# By field; some accept an empty list or one text.
_REASONS = {
    "container": "Quire runs no tools, so it has no containers",
    "mcp_servers": "Quire calls no tools; connect the client to MCP servers, and send their tools in tools",
    "compaction": "conversations are not compacted",
    "stop": "use stop_sequences",
    "response_format": "use output_config.format",
    "thread": "conversations are not stored, because gateways share no state; send all messages",
    "fallbacks": "a request is answered by the model that it names",
    "inference_geo": "Quire runs where its engines are",
}
_NEUTRAL: dict[str, Any] = {"mcp_servers": [], "fallbacks": [], "inference_geo": "global"}
_IGNORED = "Accepted and ignored: it does not change the answer."
_EDITS = ("clear_thinking_20251015",)


class Message(StrictBody):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"] = Field(
        description="Author of the message. Messages of one author behind each other are one turn."
    )
    content: str | Items[ContentBlock] = Field(description="A text, or blocks of content.")


class ThinkingConfig(StrictBody):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "disabled", "adaptive"] = Field(
        description="`adaptive` leaves it to the chat template, or to `output_config.effort`."
    )
    budget_tokens: Int32 | None = Field(None, ge=1, description="With `enabled`: maximum tokens of the thought.")
    display: Literal["summarized", "omitted"] | None = Field(
        None, description="`omitted` moves the texts of thoughts to their signatures. Default: they are returned."
    )


class JsonOutputFormat(StrictBody):
    """The format of the answer: JSON that follows a schema."""

    type: Literal["json_schema"] = Field(description="The type of the format.")
    schema_: Schema = Field(alias="schema", description="The JSON schema.")


class OutputConfig(StrictBody):
    """Options of the answer."""

    effort: str | None = Field(
        None,
        min_length=1,
        max_length=32,
        description="The template's variable `reasoning_effort`, such as `high`.",
    )
    format: JsonOutputFormat | None = Field(None, description="The format of the answer. Default: text.")
    task_budget: None = Field(None, description="Not supported.")


class KeptTurns(StrictBody):
    """The turns of the assistant that keep their thoughts."""

    type: Literal["thinking_turns", "all"] = Field(description="`all`, or the last turns with thoughts.")
    value: Int32 | None = Field(None, ge=1, description="With `thinking_turns`: their number.")


class ContextEdit(StrictBody):
    """A change of the conversation before it is answered."""

    type: Literal[_EDITS] = Field(description="Only thoughts can be cleared.")  # type: ignore[valid-type]
    keep: Literal["all"] | KeptTurns | None = Field(
        None, description="The turns that keep their thoughts. Default: the last one that has any."
    )


class ContextManagement(StrictBody):
    """Changes of the conversation before it is answered."""

    edits: Items[ContextEdit] | None = Field(None, description="The changes.")


class MessageFields(requests.GenerationRequest):
    """The fields that determine a conversation, and those of its answer."""

    messages: Items[Message] = Field(min_length=1, description="The conversation, oldest message first.")
    system: str | Items[TextBlock] | None = Field(None, description="A system message in front of the messages.")
    max_tokens: Int32 | None = Field(None, description="Maximum number of tokens; at most as many as fit the context.")
    stop_sequences: Items[str] | None = Field(None, description="Stop strings, at most 64.")
    tools: Items[Tool] | None = Field(None, description="Tools that the model can call.")
    tool_choice: ToolChoice | None = Field(None, description="Whether the model calls a tool. Default: `auto`.")
    thinking: ThinkingConfig | None = Field(None, description="Thoughts. Default: as the chat template has it.")
    output_config: OutputConfig | None = Field(None, description="Effort and format of the answer.")
    output_format: JsonOutputFormat | None = Field(None, description="Same as `output_config.format`.")
    context_management: ContextManagement | None = Field(None, description="Changes of the conversation.")
    chat_template_kwargs: Schema | None = Field(
        None, description="Further variables of the chat template, at most 16,384 bytes as JSON."
    )

    metadata: Schema | None = Field(None, description=_IGNORED)
    speed: str | None = Field(None, description=_IGNORED)
    betas: Items[str] | None = Field(None, description=_IGNORED)
    diagnostics: Schema | None = Field(None, description=_IGNORED)
    billing_policy: Schema | None = Field(None, description=_IGNORED)
    fallback_credit_token: str | Schema | None = Field(None, description=_IGNORED)
    user_profile_id: str | None = Field(None, description=_IGNORED)
    workspace_id: str | None = Field(None, description=_IGNORED)

    mcp_servers: list[Any] | None = Field(None, max_length=0, description="Only an empty list is supported.")
    fallbacks: list[Any] | None = Field(None, max_length=0, description="Only an empty list is supported.")
    inference_geo: Literal["global"] | None = Field(None, description="Only `global` is supported.")
    container: None = Field(None, description="Not supported.")
    compaction: None = Field(None, description="Not supported.")
    thread: None = Field(None, description="Not supported: nothing is stored.")
    n: None = Field(None, description="Not supported: there is one answer.")
    stop: None = Field(None, description="Not supported: use `stop_sequences`.")
    stream_options: None = Field(None, description="Not supported: streams always have the usage.")
    response_format: None = Field(None, description="Not supported: use `output_config.format`.")
    prompt_logprobs: None = Field(None, description="Not supported.")
    return_token_ids: None = Field(None, description="Not supported.")

    @field_validator(*_REASONS, mode="before")
    @classmethod
    def _explain(cls, value: Any, field: ValidationInfo) -> Any:
        """Reject a value that is not supported with the reason."""
        name = field.field_name or ""
        if value is None or (name in _NEUTRAL and value == _NEUTRAL[name]):
            return value
        raise PydanticCustomError(UNSUPPORTED, _REASONS[name])


class MessagesRequest(MessageFields):
    """The body of /v1/messages."""

    max_tokens: Int32 = Field(description="Maximum number of tokens; at most as many as fit the context.")


class CountTokensRequest(MessageFields):
    """The body of /v1/messages/count_tokens."""
