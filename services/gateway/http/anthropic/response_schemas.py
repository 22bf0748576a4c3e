"""Schemas of responses, for the OpenAPI description only: responses are encoded without these classes."""

from typing import Literal

from pydantic import BaseModel, Field

from services.gateway.http.json_types import Schema

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]
ErrorType = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "timeout_error",
    "overloaded_error",
    "api_error",
]


class GeneratedText(BaseModel):
    """A generated text."""

    type: Literal["text"] = Field(description="Type of the block.")
    text: str = Field(description="The text.")


class GeneratedThought(BaseModel):
    """A thought in front of an answer."""

    type: Literal["thinking"] = Field(description="Type of the block.")
    thinking: str = Field(description="The text of the thought, empty with `display` set to `omitted`.")
    signature: str = Field(
        description="Has the thought with `display` set to `omitted`, else always the same: thoughts are not signed."
    )


class GeneratedCall(BaseModel):
    """A call of a tool."""

    type: Literal["tool_use"] = Field(description="Type of the block.")
    id: str = Field(description="Id of the call, for its result.")
    name: str = Field(description="Name of the tool.")
    input: Schema = Field(description="The arguments; text that is no JSON object is in a member `INVALID_JSON`.")


class ThinkingTokens(BaseModel):
    """Details of the generated tokens."""

    thinking_tokens: int = Field(description="Tokens of thoughts.")


class MessageUsage(BaseModel):
    """Token counts of an answer."""

    input_tokens: int = Field(description="Tokens of the prompt that were not in the prefix cache.")
    cache_creation_input_tokens: Literal[0] = Field(description="Always 0: not counted.")
    cache_read_input_tokens: int = Field(description="Tokens of the prompt that were in the prefix cache.")
    output_tokens: int = Field(description="Generated tokens.")
    output_tokens_details: ThinkingTokens = Field(description="Details of the generated tokens.")


class MessageBody(BaseModel):
    """The response of /v1/messages."""

    id: str = Field(description="Id of the request, as for `quire explain`.")
    type: Literal["message"] = Field(description="Type of the object.")
    role: Literal["assistant"] = Field(description="Author of the message.")
    model: str = Field(description="Name of the model.")
    content: list[GeneratedText | GeneratedThought | GeneratedCall] = Field(
        description="The blocks, in the order in which they were generated."
    )
    stop_reason: StopReason = Field(description="Why the answer ended.")
    stop_sequence: str | None = Field(description="The stop string that ended it.")
    usage: MessageUsage = Field(description="Token counts.")
    warnings: list[str] | None = Field(
        None, description="What has no effect: `strict`, or cases of a schema, with their places."
    )


class TokensCount(BaseModel):
    """The number of tokens of a conversation."""

    input_tokens: int = Field(description="Tokens of the prompt.")


class MessageErrorDetail(BaseModel):
    """Details of an error."""

    type: ErrorType = Field(description="Class of the error.")
    message: str = Field(description="Human-readable message, which names the invalid field.")
    details: Schema | None = Field(None, description="For `thread`: that it is not supported.")


class MessageError(BaseModel):
    """An error response."""

    type: Literal["error"] = Field(description="Type of the object.")
    error: MessageErrorDetail = Field(description="The error.")
    request_id: str = Field(description="Id of the request; the header `request-id` has it, too.")
