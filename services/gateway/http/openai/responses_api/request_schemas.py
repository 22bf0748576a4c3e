"""Schema of the body of /v1/responses: OpenAI's fields and those that chats have besides.

Unknown fields are rejected by name. Fields of OpenAI's that are not supported accept only null, or the value that
Quire has anyway; some have a reason.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from services.gateway.http.json_types import Int32, Items, Members, Schema
from services.gateway.http.openai import requests
from services.gateway.http.openai.responses_api.item_schemas import InputItem
from services.gateway.http.openai.responses_api.tool_schemas import ResponseTool, ToolChoice
from services.gateway.http.strict_body import StrictBody
from services.runtime.http.validation import UNSUPPORTED

_NOT_STORED = "responses are not stored, because gateways share no state"
# By field; `background` accepts false, `context_management` an empty list.
_REASONS = {
    "previous_response_id": f"{_NOT_STORED}; send the whole conversation as input",
    "conversation": f"{_NOT_STORED}; send the whole conversation as input",
    "background": _NOT_STORED,
    "prompt": "prompt templates are not stored; send instructions and input",
    "context_management": "conversations are not compacted",
    "moderation": "there is no moderation",
}
_IGNORED = "Accepted and ignored."
_LOGPROBS, _ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
Summary = Literal["auto", "concise", "detailed"] | None
# The others are about items that Quire does not make.
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class TextFormat(StrictBody):
    """The format of the output."""

    type: Literal["text", "json_object", "json_schema"] = Field(description="The type of the format.")
    name: str | None = Field(None, description=_IGNORED)
    description: str | None = Field(None, description=_IGNORED)
    schema_: Schema | bool | None = Field(None, alias="schema", description="The schema, with `json_schema`.")
    strict: bool | None = Field(None, description="Accepted and ignored: the output always follows the schema.")


class TextOptions(StrictBody):
    """Options of the text."""

    format: TextFormat | None = Field(None, description="The format of the output. Default: text.")
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="The template's variable `verbosity`.")


class ReasoningOptions(StrictBody):
    """How the model thinks."""

    effort: Annotated[str, Field(min_length=1, max_length=32)] | None = Field(
        None,
        description="The template's variable `reasoning_effort`, such as `low`; `none` turns thoughts off, any other"
        " value on, with a template that has a switch.",
    )
    summary: Summary = Field(None, description="Accepted and ignored: the whole thought is returned.")
    generate_summary: Summary = Field(None, description="Same as `summary`.")
    context: Literal["auto"] | None = Field(None, description="Only `auto`: the template chooses earlier thoughts.")
    mode: Literal["standard"] | None = Field(None, description="Only `standard` is supported.")


class ResponseStreamOptions(StrictBody):
    """Options of a stream."""

    include_obfuscation: bool | None = Field(None, description=_IGNORED)


class ResponsesRequest(requests.GenerationRequest):
    """The body of /v1/responses."""

    input: str | Items[InputItem] = Field(description="The text of a user, or a conversation, oldest item first.")
    instructions: str | None = Field(None, description="A system message before the input.")
    max_output_tokens: Int32 | None = Field(
        None, description="Maximum number of tokens. Default: limited by the context length."
    )
    tools: Items[ResponseTool] | None = Field(
        None, description="Tools that the model can call. Built-in tools are left out, with a warning."
    )
    tool_choice: ToolChoice | None = Field(
        None,
        description="Whether the model can, must or must not call a tool, or the tool to call, or those to choose from."
        " Default `auto`.",
    )
    parallel_tool_calls: bool | None = Field(None, description="If false, at most one call. Default true.")
    text: TextOptions | None = Field(None, description="Options of the text, such as its format.")
    reasoning: ReasoningOptions | None = Field(None, description="How the model thinks.")
    include: Items[Includable] | None = Field(
        None,
        description="Additional output: the log-probabilities of the text; thoughts as `encrypted_content`, for clients"
        " that send no other part of them back. Others have no effect.",
    )
    top_logprobs: Int32 | None = Field(
        None, description="With log-probabilities: number of most likely tokens for each position, 0 to 20."
    )
    chat_template_kwargs: Schema | None = Field(
        None, description="Further variables of the chat template, at most 16,384 bytes as JSON."
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="`auto` is as `disabled`: an input that does not fit is refused."
    )
    metadata: Members[str] | None = Field(None, description="Returned with the response.")
    max_tool_calls: Int32 | None = Field(
        None, description="Accepted and ignored: it limits calls of built-in tools, which are not run."
    )
    stream_options: ResponseStreamOptions | None = Field(None, description="Options with `stream`.")  # type: ignore[assignment]

    background: Literal[False] | None = Field(None, description="Only false is supported: nothing is stored.")
    previous_response_id: None = Field(None, description="Not supported: nothing is stored.")
    conversation: None = Field(None, description="Not supported: nothing is stored.")
    prompt: None = Field(None, description="Not supported: nothing is stored.")
    context_management: Annotated[list[Any], Field(max_length=0)] | None = Field(None, description="Must be empty.")
    moderation: None = Field(None, description="Not supported.")
    n: Literal[1] | None = Field(None, description="Only 1: a response has one output.")
    response_format: None = Field(None, description="Not supported: use `text.format`.")
    prompt_logprobs: None = Field(None, description="Not supported.")
    return_token_ids: None = Field(None, description="Not supported.")

    @field_validator(*_REASONS, mode="before")
    @classmethod
    def _explain(cls, value: Any, field: ValidationInfo) -> Any:
        """Reject a value that is not supported with the reason. Values of a wrong type get their own error."""
        if value in (None, []) or (field.field_name == "background" and value is not True):
            return value
        raise PydanticCustomError(UNSUPPORTED, _REASONS[field.field_name or ""])

    @property
    def wants_logprobs(self) -> bool:
        """Whether the client requested log-probabilities of the text."""
        return _LOGPROBS in (self.include or ())

    @property
    def wants_encrypted_thoughts(self) -> bool:
        """Whether the client requested thoughts in the form in which it sends them back."""
        return _ENCRYPTED in (self.include or ())
