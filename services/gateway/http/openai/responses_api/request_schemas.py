"""Schema of the body of /v1/responses: OpenAI's fields and those that chats have besides.

Unknown fields are rejected by name. Fields of OpenAI's that are not supported accept only null, or the value that
Quire has anyway; some have a reason.
"""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from services.gateway.http.openai import requests
from services.runtime.http.validation import UNSUPPORTED

_NOT_STORED = "responses are not stored, because gateways share no state"
# By field; `store` and `background` accept false.
_REASONS = {
    "previous_response_id": f"{_NOT_STORED}; send the whole conversation as input",
    "conversation": f"{_NOT_STORED}; send the whole conversation as input",
    "store": _NOT_STORED,
    "background": _NOT_STORED,
    "prompt": "prompt templates are not stored; send instructions and input",
    "reasoning": "the effort of reasoning cannot be set",
    "max_tool_calls": "there are no built-in tools",
    "context_management": "conversations are not compacted",
    "moderation": "there is no moderation",
}
_ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")
_IGNORED = "Accepted and ignored."
_IGNORED_ITEM_FIELD = "Accepted and ignored: items of a response are accepted as input."


class DumpedBody(requests.StrictBody):
    """A part of the input that clients copy from a response. An unknown member is ignored if it is null.

    OpenAI's client dumps every member that its own version has, and newer versions have more.
    """

    @model_validator(mode="before")
    @classmethod
    def _without_unknown_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {name: value for name, value in given.items() if value is not None or name in cls.model_fields}


class InputText(DumpedBody):
    """A text of a message. Images, audio and files are not supported."""

    type: Literal["input_text", "output_text"] = Field(description="`input_text`, or `output_text` of the assistant.")
    text: str = Field(description="The text.")
    annotations: list[Any] | None = Field(None, description=_IGNORED)
    logprobs: list[Any] | None = Field(None, description=_IGNORED)
    parsed: Any = Field(None, description="Accepted and ignored: OpenAI's client sends it.")


class InputMessage(DumpedBody):
    """A message of the conversation."""

    type: Literal["message"] | None = Field("message", description="Type of the item.")
    role: Literal["user", "assistant", "system", "developer"] = Field(
        description="Author of the message; `developer` is `system` for a chat template without that role."
    )
    content: str | requests.Items[InputText] = Field(description="The text of the message.")
    id: str | None = Field(None, description=_IGNORED_ITEM_FIELD)
    status: str | None = Field(None, description=_IGNORED_ITEM_FIELD)
    phase: str | None = Field(None, description=_IGNORED_ITEM_FIELD)


class InputFunctionCall(DumpedBody):
    """A function call of the assistant."""

    type: Literal["function_call"] = Field(description="Type of the item.")
    name: str = Field(description="Name of the function.")
    arguments: str = Field(description="The arguments, a JSON object as text.")
    call_id: str = Field(description="Id of the call, for its output.")
    id: str | None = Field(None, description=_IGNORED_ITEM_FIELD)
    status: str | None = Field(None, description=_IGNORED_ITEM_FIELD)
    parsed_arguments: Any = Field(None, description="Accepted and ignored: OpenAI's client sends it.")
    caller: None = Field(None, description="Not supported.")
    namespace: None = Field(None, description="Not supported.")


class FunctionCallResult(DumpedBody):
    """The output of a function call."""

    type: Literal["function_call_output"] = Field(description="Type of the item.")
    call_id: str = Field(description="Id of an earlier function call.")
    output: str | requests.Items[InputText] = Field(description="The text that the function returned.")
    id: str | None = Field(None, description=_IGNORED_ITEM_FIELD)
    status: str | None = Field(None, description=_IGNORED_ITEM_FIELD)
    name: str | None = Field(None, description=_IGNORED_ITEM_FIELD)
    caller: None = Field(None, description="Not supported.")
    namespace: None = Field(None, description="Not supported.")


class ReasoningText(DumpedBody):
    """A text of a thought."""

    type: Literal["reasoning_text"] = Field(description="Type of the part.")
    text: str = Field(description="The text.")


class InputReasoning(DumpedBody):
    """A thought of the assistant in front of its next message or call."""

    type: Literal["reasoning"] = Field(description="Type of the item.")
    content: requests.Items[ReasoningText] | None = Field(None, description="The text of the thought.")
    summary: list[Any] | None = Field(None, description=_IGNORED)
    encrypted_content: str | None = Field(None, description=_IGNORED)
    id: str | None = Field(None, description=_IGNORED_ITEM_FIELD)
    status: str | None = Field(None, description=_IGNORED_ITEM_FIELD)


class UnsupportedItem(requests.StrictBody):
    """An item of another type: always rejected."""

    type: Literal[_ITEM_TYPES] = Field(description="Other types are not supported.")  # type: ignore[valid-type]


def _tag(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else None
    if kind is None:
        return "message"
    return kind if kind in _ITEM_TYPES else "unsupported"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputFunctionCall, Tag("function_call")]
    | Annotated[FunctionCallResult, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")]
    | Annotated[UnsupportedItem, Tag("unsupported")],
    Discriminator(_tag),
]


class FunctionTool(requests.StrictBody):
    """A function that the model can call. Built-in tools are not supported."""

    type: Literal["function"] = Field(description="Only functions are supported.")
    name: str = Field(description="Name of the function.")
    description: str | None = Field(None, description="Description of the function for the model.")
    parameters: requests.Schema | None = Field(None, description="JSON schema of the arguments. Default: no arguments.")
    strict: bool | None = Field(
        None, description="Arguments follow the schema. Default: only if a call is required, or beside a format."
    )


class FunctionChoice(requests.StrictBody):
    """The function that the model must call."""

    type: Literal["function"] = Field(description="Only functions are supported.")
    name: str = Field(description="Name of a function in `tools`.")


class TextFormat(requests.StrictBody):
    """The format of the output."""

    type: Literal["text", "json_object", "json_schema"] = Field(description="The type of the format.")
    name: str | None = Field(None, description=_IGNORED)
    description: str | None = Field(None, description=_IGNORED)
    schema_: requests.Schema | bool | None = Field(None, alias="schema", description="The schema, with `json_schema`.")
    strict: bool | None = Field(None, description="Accepted and ignored: the output always follows the schema.")


class TextOptions(requests.StrictBody):
    """Options of the text."""

    format: TextFormat | None = Field(None, description="The format of the output. Default: text.")
    verbosity: None = Field(None, description="Not supported.")


class ResponseStreamOptions(requests.StrictBody):
    """Options of a stream."""

    include_obfuscation: bool | None = Field(None, description=_IGNORED)


class ResponsesRequest(requests.GenerationRequest):
    """The body of /v1/responses."""

    input: str | requests.Items[InputItem] = Field(
        description="The text of a user, or a conversation, oldest item first."
    )
    instructions: str | None = Field(None, description="A system message before the input.")
    max_output_tokens: requests.Int32 | None = Field(
        None, description="Maximum number of tokens. Default: limited by the context length."
    )
    tools: requests.Items[FunctionTool] | None = Field(None, description="Tools that the model can call.")
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = Field(
        None,
        description="Whether the model can, must or must not call a tool, or the tool to call. Default `auto`.",
    )
    parallel_tool_calls: bool | None = Field(None, description="If false, at most one call. Default true.")
    text: TextOptions | None = Field(None, description="Options of the text, such as its format.")
    include: requests.Items[Literal["message.output_text.logprobs"]] | None = Field(
        None, description="Additional output: the log-probabilities of the text."
    )
    top_logprobs: requests.Int32 | None = Field(
        None, description="With log-probabilities: number of most likely tokens for each position, 0 to 20."
    )
    chat_template_kwargs: requests.Schema | None = Field(
        None, description="Further variables of the chat template, at most 16,384 bytes as JSON."
    )
    truncation: Literal["disabled"] | None = Field(None, description="Only `disabled` is supported.")
    metadata: requests.Members[str] | None = Field(None, description="Returned with the response.")
    prompt_cache_retention: Literal["in_memory"] | None = Field(None, description="Only `in_memory` is supported.")
    stream_options: ResponseStreamOptions | None = Field(None, description="Options with `stream`.")  # type: ignore[assignment]

    store: Literal[False] | None = Field(None, description="Only false is supported: nothing is stored.")
    background: Literal[False] | None = Field(None, description="Only false is supported: nothing is stored.")
    previous_response_id: None = Field(None, description="Not supported: nothing is stored.")
    conversation: None = Field(None, description="Not supported: nothing is stored.")
    prompt: None = Field(None, description="Not supported: nothing is stored.")
    reasoning: None = Field(None, description="Not supported.")
    max_tool_calls: None = Field(None, description="Not supported: there are no built-in tools.")
    context_management: None = Field(None, description="Not supported.")
    moderation: None = Field(None, description="Not supported.")
    prompt_cache_options: None = Field(None, description="Not supported.")
    n: None = Field(None, description="Not supported: a response has one output.")
    response_format: None = Field(None, description="Not supported: use `text.format`.")
    prompt_logprobs: None = Field(None, description="Not supported.")
    return_token_ids: None = Field(None, description="Not supported.")

    @field_validator(*_REASONS, mode="before")
    @classmethod
    def _explain(cls, value: Any, field: ValidationInfo) -> Any:
        """Reject a value that is not supported with the reason. Values of a wrong type get their own error."""
        if value is None or (field.field_name in ("store", "background") and value is not True):
            return value
        raise PydanticCustomError(UNSUPPORTED, _REASONS[field.field_name or ""])

    @property
    def wants_logprobs(self) -> bool:
        """Whether the client requested log-probabilities of the text."""
        return "message.output_text.logprobs" in (self.include or ())
