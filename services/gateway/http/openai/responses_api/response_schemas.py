"""Schemas of responses, for the OpenAPI description only: responses are encoded without these classes."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from services.gateway.http.json_types import Schema
from services.gateway.http.openai.responses import ChatTokenLogprob

Status = Literal["in_progress", "completed", "incomplete", "failed"]
ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(BaseModel):
    """The text of a message."""

    type: Literal["output_text"] = Field(description="Type of the object.")
    text: str = Field(description="The generated text.")
    annotations: list[Any] = Field(max_length=0, description="Always empty.")
    logprobs: list[ChatTokenLogprob] = Field(description="Log-probabilities, if requested.")


class OutputMessage(BaseModel):
    """A generated message."""

    type: Literal["message"] = Field(description="Type of the object.")
    id: str = Field(description="Id of the item.")
    role: Literal["assistant"] = Field(description="Role of the author.")
    status: ItemStatus = Field(description="`incomplete` if the response ended in it.")
    content: list[OutputText] = Field(description="One text.")


class OutputThoughtText(BaseModel):
    """The text of a thought."""

    type: Literal["reasoning_text"] = Field(description="Type of the object.")
    text: str = Field(description="The generated text.")


class OutputReasoning(BaseModel):
    """A thought."""

    type: Literal["reasoning"] = Field(description="Type of the object.")
    id: str = Field(description="Id of the item.")
    summary: list[Any] = Field(max_length=0, description="Always empty.")
    content: list[OutputThoughtText] = Field(description="One text.")
    encrypted_content: str | None = Field(
        None, description="If requested: the same text, encoded, for clients that send only this back."
    )
    status: ItemStatus = Field(description="`incomplete` if the response ended in it.")


class OutputCustomCall(BaseModel):
    """A generated call of a custom tool."""

    type: Literal["custom_tool_call"] = Field(description="Type of the object.")
    id: str = Field(description="Id of the item.")
    call_id: str = Field(description="Id of the call, for its output.")
    name: str = Field(description="Name of the tool.")
    namespace: str | None = Field(None, description="Namespace of the tool, if it has one.")
    input: str = Field(description="The input of the tool.")
    status: ItemStatus = Field(description="`incomplete` if the response ended in it.")


class OutputFunctionCall(BaseModel):
    """A generated function call."""

    type: Literal["function_call"] = Field(description="Type of the object.")
    id: str = Field(description="Id of the item.")
    call_id: str = Field(description="Id of the call, for its output.")
    name: str = Field(description="Name of the function.")
    namespace: str | None = Field(None, description="Namespace of the function, if it has one.")
    arguments: str = Field(description="The arguments, a JSON object as text.")
    status: ItemStatus = Field(description="`incomplete` if the response ended in it.")


class IncompleteDetails(BaseModel):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"] = Field(description="The limit of tokens, or of the context.")


class ResponseFailure(BaseModel):
    """The error that ended a response in mid-stream."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"] = Field(description="Class of the error.")
    message: str = Field(description="Human-readable message.")


class InputTokensDetails(BaseModel):
    """Details of the input tokens."""

    cached_tokens: int = Field(description="Tokens found in the prefix cache.")
    cache_write_tokens: int = Field(description="Always 0: not counted.")


class OutputTokensDetails(BaseModel):
    """Details of the output tokens."""

    reasoning_tokens: int = Field(description="Tokens of thoughts.")


class ResponseUsage(BaseModel):
    """Token counts of a response."""

    input_tokens: int = Field(description="Tokens of the conversation.")
    input_tokens_details: InputTokensDetails = Field(description="Details of the input tokens.")
    output_tokens: int = Field(description="Generated tokens.")
    output_tokens_details: OutputTokensDetails = Field(description="Details of the output tokens.")
    total_tokens: int = Field(description="Sum of both.")


class ResponseBody(BaseModel):
    """The response of /v1/responses. Fields of the request are returned with it."""

    id: str = Field(description="Id of the request, as for `quire explain`.")
    object: Literal["response"] = Field(description="Type of the object.")
    created_at: int = Field(description="Unix time in seconds.")
    completed_at: int | None = Field(description="Unix time in seconds; null unless it is completed.")
    status: Status = Field(description="`incomplete`: the limit of tokens was reached.")
    error: ResponseFailure | None = Field(description="The error of a failed response.")
    incomplete_details: IncompleteDetails | None = Field(description="Why it is incomplete.")
    model: str = Field(description="Name of the model.")
    output: list[OutputMessage | OutputFunctionCall | OutputCustomCall | OutputReasoning] = Field(
        description="The generated items."
    )
    usage: ResponseUsage | None = Field(description="Token counts; null while it is generated.")
    temperature: float = Field(description="The temperature that was used.")
    top_p: float = Field(description="The `top_p` that was used.")
    warnings: list[str] | None = Field(
        None,
        description="What has no effect: `strict`, built-in tools, grammars, or cases of a schema, with their places.",
    )
    instructions: str | None = Field(description="As in the request.")
    max_output_tokens: int | None = Field(description="As in the request.")
    metadata: dict[str, str] = Field(description="As in the request.")
    parallel_tool_calls: bool = Field(description="As in the request.")
    prompt_cache_key: str | None = Field(description="As in the request.")
    safety_identifier: str | None = Field(description="As in the request.")
    text: dict[str, str | Schema] = Field(description="As in the request.")
    tool_choice: str | Schema = Field(description="As in the request.")
    tools: list[Schema] = Field(description="As in the request.")
    top_logprobs: int = Field(description="As in the request.")
    user: str | None = Field(description="As in the request.")
    background: Literal[False] = Field(description="Always false.")
    store: Literal[False] = Field(description="Always false: nothing is stored.")
    previous_response_id: None = Field(description="Always null.")
    max_tool_calls: int | None = Field(description="As in the request.")
    reasoning: dict[str, str | None] = Field(description="The effort as in the request; no summary.")
    service_tier: Literal["default"] = Field(description="Always `default`.")
    truncation: Literal["disabled"] = Field(description="Always `disabled`.")


class InputTokenCount(BaseModel):
    """The response of /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"] = Field(description="Type of the object.")
    input_tokens: int = Field(description="Tokens of the conversation, as `usage` of its response counts them.")
