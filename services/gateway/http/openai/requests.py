"""Schemas of request bodies: OpenAI's fields and vLLM's extensions.

Unknown fields are rejected by name. Unsupported fields that could change the output accept only null.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from google.protobuf.descriptor import FieldDescriptor
from pydantic import BaseModel, ConfigDict, Field, create_model

from services.gateway.http import member_policy
from services.gateway.http.json_types import Int32, Int64, Items, Members, Real, Schema
from services.gateway.http.member_policy import UnusedMember
from services.gateway.http.openai.declared_fields import DECLARED
from services.gateway.http.strict_body import StrictBody
from services.wire.field_rules import DeclaredField

Tokens = Items[Int32]
# Of any size: a bound would blur the errors of the union type that prompts have. The translation checks it.
PromptTokens = Items[int]

MAX_PROMPTS = 128


class StreamOptions(StrictBody):
    """Options of a stream."""

    include_usage: bool | None = Field(None, description="Send a last chunk with the usage.")
    continuous_usage_stats: bool | None = Field(
        None, description="With `include_usage`: send the usage so far with every chunk."
    )
    include_obfuscation: bool | None = Field(None, description="Accepted and ignored.")


class JsonSchemaFormat(StrictBody):
    """A JSON schema in OpenAI's format."""

    name: str = Field(description="Accepted and ignored.")
    description: str | None = Field(None, description="Accepted and ignored.")
    schema_: Schema | bool | None = Field(None, alias="schema", description="The schema. Default: any JSON object.")
    strict: bool | None = Field(None, description="Accepted and ignored: the output always follows the schema.")


class ResponseFormat(StrictBody):
    """The format of the output."""

    type: Literal["text", "json_object", "json_schema"] = Field(description="The type of the format.")
    json_schema: JsonSchemaFormat | None = Field(None, description="The schema, with type `json_schema`.")


class StructuredOutputs(StrictBody):
    """The format of the output, as in vLLM. Set one field."""

    json_: Schema | str | None = Field(None, alias="json", description="A JSON schema, as an object or as text.")
    regex: str | None = Field(None, description="A regular expression that matches the whole output.")
    choice: Items[str] | None = Field(None, description="The output is one of these texts.")
    json_object: bool | None = Field(None, description="The output is any JSON object.")


_TYPES: dict[int, Any] = {
    FieldDescriptor.TYPE_DOUBLE: Real,
    FieldDescriptor.TYPE_INT32: Int32,
    FieldDescriptor.TYPE_INT64: Int64,
    FieldDescriptor.TYPE_BOOL: bool,
    FieldDescriptor.TYPE_STRING: str,
}


def _schema_of(field: DeclaredField) -> tuple[Any, Any]:
    """Return type and description of a field that the contract declares."""
    kind = _TYPES[field.value_type]
    if field.is_map or field.descriptor.is_repeated:
        kind = (Members if field.is_map else Items)[kind]
    return kind | None, Field(None, description=field.described())


if TYPE_CHECKING:

    class DeclaredFields(StrictBody):
        """The fields of the contract that code reads by name."""

        n: int | None
        prompt_logprobs: int | None
        return_token_ids: bool | None
        stop_token_ids: list[int] | None
        thinking_token_budget: int | None

    class UnusedMembers(StrictBody):
        """The members of every request that have no effect, of which answers repeat some."""

        user: str | None
        metadata: dict[str, Any] | None
        store: bool | None
        safety_identifier: str | None
        prompt_cache_key: str | None

    class UnusedOfCompletions(StrictBody):
        """The members of completions that have no effect."""

    class UnusedOfChats(StrictBody):
        """The members of chats that have no effect."""

    class UnusedOfMessages(StrictBody):
        """The members of messages that have no effect."""

else:
    _SCHEMAS = {name: _schema_of(path.field) for name, path in DECLARED.items()}
    DeclaredFields = create_model("DeclaredFields", __base__=StrictBody, **_SCHEMAS)

    def _unused(members: Mapping[str, UnusedMember]) -> type[StrictBody]:
        fields = {
            name: (one.field_type | None, Field(None, description=one.described)) for name, one in members.items()
        }
        return create_model("UnusedMembers", __base__=StrictBody, **fields)

    UnusedMembers = _unused(member_policy.BODIES)
    UnusedOfCompletions = _unused(member_policy.COMPLETIONS)
    UnusedOfChats = _unused(member_policy.CHATS)
    UnusedOfMessages = _unused(member_policy.MESSAGES)


class GenerationRequest(DeclaredFields, UnusedMembers):
    """Fields common to completions and chats: those that the contract declares, and others."""

    model: str = Field("", description="Name of a served model. Default: the only served model.")
    stop: str | Items[str] | None = Field(None, description="Stop strings, at most 64.")
    stream: bool | None = Field(None, description="Respond with server-sent events. Default false.")
    stream_options: StreamOptions | None = Field(None, description="Options with `stream`.")
    response_format: ResponseFormat | None = Field(None, description="The format of the output.")

    skip_special_tokens: bool | None = Field(None, description="Remove special tokens from the output. Default true.")
    allowed_token_ids: Annotated[Tokens, Field(min_length=1)] | None = Field(
        None, description="Sample only from these tokens."
    )
    use_beam_search: bool | None = Field(None, description="Use beam search instead of sampling. Default false.")
    best_of: Int32 | None = Field(
        None, description="Beam width, at least `n`. Without `use_beam_search` it must equal `n`."
    )
    length_penalty: Real | None = Field(
        None, description="Length penalty of beam search; above 0 favours long outputs. Default 1."
    )
    early_stopping: bool | None = Field(
        None, description="Stop beam search once enough outputs are complete. Default false."
    )
    guided_json: Schema | str | None = Field(None, description="Same as `structured_outputs.json`.")
    guided_regex: str | None = Field(None, description="Same as `structured_outputs.regex`.")
    guided_choice: Items[str] | None = Field(None, description="Same as `structured_outputs.choice`.")
    structured_outputs: StructuredOutputs | None = Field(None, description="The format of the output.")
    request_id: str | None = Field(
        None, description="Id of the request, unlike that of any live request. Default: a new one."
    )
    timeout: Real | None = Field(None, description="Deadline in seconds, from arrival to the last token.")


class CompletionRequest(GenerationRequest, UnusedOfCompletions):
    """The body of /v1/completions."""

    prompt: str | Items[str] | PromptTokens | Items[PromptTokens] = Field(
        description=f"Text or token ids, or a list of up to {MAX_PROMPTS} of either."
    )
    max_tokens: Int32 | None = Field(
        None, description="Maximum number of tokens for each choice; 0 generates none. Default 16."
    )
    max_completion_tokens: Int32 | None = Field(None, description="Same as `max_tokens`.")
    logprobs: Int32 | None = Field(
        None, description="Number of most likely tokens to return for each position, 0 to 20."
    )
    echo: bool | None = Field(None, description="Include the prompt in the output. Default false.")


class FunctionCall(StrictBody):
    """A function call of the assistant."""

    name: str = Field(description="Name of the function.")
    arguments: str | None = Field(None, description="The arguments, a JSON object as text. Default: none.")
    parsed_arguments: Any = Field(None, description="Accepted and ignored: OpenAI's client sends it.")


class ToolCallInput(StrictBody):
    """A tool call in a message of the assistant."""

    model_config = ConfigDict(title="ToolCall")

    id: str = Field("", description="Id of the call.")
    type: Literal["function"] = Field("function", description="Only functions are supported.")
    function: FunctionCall = Field(description="The function call.")
    index: Int32 | None = Field(None, description="Accepted and ignored.")


class ContentPart(BaseModel):
    """A part of a message. Parts of type `text` are joined by new lines; other types are not supported."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str = Field(description="Must be `text`.")
    text: str | None = Field(None, description="The text.")


class ChatMessage(UnusedOfMessages):
    """A message of a conversation."""

    role: str = Field(description="`system`, `user`, `assistant`, `tool`, or another role of the chat template.")
    content: str | Items[ContentPart] | None = Field(None, description="The text of the message.")
    name: str | None = Field(None, description="Name of the author, if the chat template renders it.")
    tool_calls: Items[ToolCallInput] | None = Field(None, description="The tool calls of the assistant.")
    tool_call_id: str | None = Field(None, description="Id of the call that a message of role `tool` responds to.")
    reasoning_content: str | None = Field(None, description="The thought of the assistant.")
    reasoning: str | None = Field(None, description="Same as `reasoning_content`.")
    audio: None = Field(None, description="Not supported.")
    function_call: None = Field(None, description="Not supported.")


class Function(StrictBody):
    """A function that the model can call."""

    name: str = Field(description="Name of the function.")
    description: str | None = Field(None, description="Description of the function for the model.")
    parameters: Schema | None = Field(None, description="JSON schema of the arguments. Default: no arguments.")
    strict: bool | None = Field(
        None, description="Arguments follow the schema. Default: only if a call is required, or beside a format."
    )


class Tool(StrictBody):
    """A tool that the model can call."""

    type: Literal["function"] = Field(description="Only functions are supported.")
    function: Function = Field(description="The function.")


class NamedFunction(StrictBody):
    """The name of a function."""

    name: str = Field(description="Name of a function in `tools`.")


class NamedTool(StrictBody):
    """The tool that the model must call."""

    type: Literal["function"] = Field(description="Only functions are supported.")
    function: NamedFunction = Field(description="The function.")


class Thinking(StrictBody):
    """Whether the model thinks, as Anthropic's and others' chats say it."""

    type: Literal["enabled", "disabled", "adaptive"] = Field(description="`adaptive` leaves it to the template.")
    budget_tokens: Int32 | None = Field(None, description="With `enabled`: same as `thinking_token_budget`.")


class ChatTemplateFields(StrictBody):
    """Fields that change how a chat becomes a prompt."""

    add_generation_prompt: bool | None = Field(
        None,
        description="Add the start of the assistant's message. Default: true, unless `continue_final_message` is set.",
    )
    continue_final_message: bool | None = Field(
        None, description="Continue the last message, which must be the assistant's. Default false."
    )
    chat_template_kwargs: Schema | None = Field(
        None, description="Further variables of the chat template, at most 16,384 bytes as JSON."
    )
    reasoning_effort: Annotated[str, Field(min_length=1, max_length=32)] | None = Field(
        None,
        description="The template's variable `reasoning_effort`, such as `low`; `none` turns thoughts off, any other"
        " value on, with a template that has a switch.",
    )
    enable_thinking: bool | None = Field(
        None, description="The template's switch for thoughts. Default: the template's."
    )
    thinking: Thinking | None = Field(None, description="The switch for thoughts, as other servers write it.")
    verbosity: Literal["low", "medium", "high"] | None = Field(
        None, description="The template's variable `verbosity`; most templates have none."
    )


class ChatCompletionRequest(GenerationRequest, ChatTemplateFields, UnusedOfChats):
    """The body of /v1/chat/completions."""

    messages: Items[ChatMessage] = Field(description="The conversation, oldest message first.")
    max_tokens: Int32 | None = Field(
        None, description="Maximum number of tokens. Default: limited by the context length."
    )
    max_completion_tokens: Int32 | None = Field(None, description="Same as `max_tokens`.")
    logprobs: bool | None = Field(
        None, description="Return the log-probabilities of the generated tokens. Default false."
    )
    top_logprobs: Int32 | None = Field(
        None, description="With `logprobs`: number of most likely tokens to return for each position, 0 to 20."
    )
    tools: Items[Tool] | None = Field(None, description="Tools that the model can call.")
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None,
        description="Whether the model can, must or must not call a tool, or the tool to call. Default `auto`.",
    )
    parallel_tool_calls: bool | None = Field(None, description="If false, at most one call. Default true.")
    include_reasoning: bool | None = Field(None, description="Return thoughts. Default true.")

    audio: None = Field(None, description="Not supported.")
    web_search_options: None = Field(None, description="Not supported.")
    chat_template: None = Field(None, description="Not supported.")


class TokenizeRequest(ChatTemplateFields):
    """The body of /tokenize: a prompt or the messages of a chat."""

    model: str | None = Field(None, description="Name of a served model. Default: the only served model.")
    prompt: str | None = Field(None, description="The text.")
    messages: Items[ChatMessage] | None = Field(None, description="A conversation, instead of `prompt`.")
    tools: Items[Tool] | None = Field(None, description="Tools of the conversation.")
    add_special_tokens: bool | None = Field(
        None,
        description="Add the model's special tokens. Default: true for a prompt; false for messages, "
        "because the chat template adds them.",
    )
    return_token_strs: bool | None = Field(
        None, description="Also return the entry of each token in the vocabulary. Default false."
    )

    chat_template: None = Field(None, description="Not supported.")
    media_io_kwargs: None = Field(None, description="Not supported.")
    mm_processor_kwargs: None = Field(None, description="Not supported.")


class DetokenizeRequest(StrictBody):
    """The body of /detokenize."""

    model: str | None = Field(None, description="Name of a served model. Default: the only served model.")
    tokens: Tokens = Field(description="Token ids.")
