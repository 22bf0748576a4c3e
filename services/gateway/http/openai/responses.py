"""Schemas of response bodies, for the OpenAPI description only: responses are encoded without these classes."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class ErrorDetail(BaseModel):
    """Details of an error."""

    message: str = Field(description="Human-readable message.")
    type: str = Field(description="Class of the error.")
    param: str | None = Field(description="Name of the invalid field.")
    code: str | None = Field(description="Machine-readable code of the error.")


class Error(BaseModel):
    """An error response."""

    error: ErrorDetail = Field(description="The error.")


class CachedTokens(BaseModel):
    """Details of the prompt tokens."""

    cached_tokens: int = Field(description="Tokens found in the prefix cache.")


class Usage(BaseModel):
    """Token counts of a response."""

    prompt_tokens: int = Field(description="Tokens of the prompts.")
    completion_tokens: int = Field(description="Generated tokens of all choices.")
    total_tokens: int = Field(description="Sum of both.")
    prompt_tokens_details: CachedTokens = Field(description="Details of the prompt tokens.")


class ReasoningTokens(BaseModel):
    """Details of the generated tokens."""

    reasoning_tokens: int = Field(description="Tokens of thoughts.")


class ChatUsage(Usage):
    """Token counts of a chat's response."""

    completion_tokens_details: ReasoningTokens = Field(description="Details of the generated tokens.")


class _Choice(BaseModel):
    index: int = Field(description="Index of the choice; choices of the first prompt come first.")
    finish_reason: Literal["stop", "length", "tool_calls"] | None = Field(description="Why the generation ended.")
    stop_reason: str | int | None = Field(
        description="The stop string or the token of `stop_token_ids` that ended it; null at the end of the sequence."
    )
    token_ids: list[int] | None = Field(None, description="Token ids of the output, with `return_token_ids`.")


class CompletionLogprobs(BaseModel):
    """Log-probabilities of the tokens of a choice."""

    tokens: list[str] = Field(description="Texts of the tokens.")
    token_logprobs: list[float | None] = Field(
        description="Log-probability of each token; null for the first token of a prompt."
    )
    top_logprobs: list[dict[str, float] | None] = Field(description="Most likely tokens at each position.")
    text_offset: list[int] = Field(description="Offset of each token in the text.")


class CompletionChoice(_Choice):
    """One generated output."""

    text: str = Field(description="The generated text, after the prompt with `echo`.")
    prompt_token_ids: list[int] | None = Field(None, description="The prompt's token ids, with `return_token_ids`.")
    logprobs: CompletionLogprobs | None = Field(description="Log-probabilities, if requested.")
    prompt_logprobs: list[dict[str, Any] | None] | None = Field(
        None, description="Log-probabilities of the prompt by token id, if requested."
    )


class _Answer(BaseModel):
    id: str = Field(description="Id of the request, as for `quire explain`.")
    created: int = Field(description="Unix time in seconds.")
    model: str = Field(description="Name of the model.")
    usage: Usage = Field(description="Token counts.")
    warnings: list[str] | None = Field(
        None, description="What has no effect: `strict`, or cases of a schema, with their places."
    )


class Completion(_Answer):
    """The response of /v1/completions."""

    object: Literal["text_completion"] = Field(description="Type of the object.")
    choices: list[CompletionChoice] = Field(description="The generated outputs.")


class TokenLogprob(BaseModel):
    """The log-probability of a token."""

    token: str = Field(description="Text of the token; incomplete characters are U+FFFD.")
    logprob: float = Field(description="Natural logarithm of the model's probability.")
    bytes: list[int] = Field(description="Bytes of the token.")


class ChatTokenLogprob(TokenLogprob):
    """The log-probability of a token, and the most likely tokens at its position."""

    top_logprobs: list[TokenLogprob] = Field(description="Most likely tokens, in descending order.")


class ChatLogprobs(BaseModel):
    """Log-probabilities of the tokens of a choice."""

    content: list[ChatTokenLogprob] = Field(description="Log-probability of each token.")
    refusal: None = Field(description="Always null.")


class FunctionCallOutput(BaseModel):
    """A function call."""

    name: str = Field(description="Name of the function.")
    arguments: str = Field(description="The arguments, a JSON object as text.")


class ToolCallOutput(BaseModel):
    """A tool call."""

    model_config = ConfigDict(title="ToolCall")

    id: str = Field(description="Id of the call.")
    type: Literal["function"] = Field(description="Type of the object.")
    function: FunctionCallOutput = Field(description="The function call.")


class AssistantMessage(BaseModel):
    """The generated message."""

    role: Literal["assistant"] = Field(description="Role of the author.")
    content: str | None = Field(description="The text; null if the message has only a thought or tool calls.")
    refusal: None = Field(description="Always null.")
    tool_calls: list[ToolCallOutput] | None = Field(None, description="The tool calls.")
    reasoning: str | None = Field(None, description="The thought before the text.")
    reasoning_content: str | None = Field(None, description="Same as `reasoning`.")


class ChatChoice(_Choice):
    """One generated output."""

    message: AssistantMessage = Field(description="The generated message.")
    logprobs: ChatLogprobs | None = Field(description="Log-probabilities, if requested.")


class ChatCompletion(_Answer):
    """The response of /v1/chat/completions."""

    object: Literal["chat.completion"] = Field(description="Type of the object.")
    choices: list[ChatChoice] = Field(description="The generated outputs.")
    usage: ChatUsage = Field(description="Token counts.")
    prompt_token_ids: list[int] | None = Field(None, description="The prompt's token ids, with `return_token_ids`.")
    prompt_logprobs: list[dict[str, Any] | None] | None = Field(
        None, description="Log-probabilities of the prompt by token id, if requested."
    )


class DefaultParameters(BaseModel):
    """Values for what requests leave out."""

    temperature: float = Field(description="Of the model's `generation_config.json`, else 1.")
    top_k: int = Field(description="Of the file, else 0.")
    top_p: float = Field(description="Of the file, else 1.")
    min_p: float = Field(description="Of the file, else 0.")
    repetition_penalty: float = Field(description="Of the file, else 1.")
    max_tokens: int | None = Field(description="The file's `max_new_tokens`, else null: as many as fit.")


class Model(BaseModel):
    """A served model."""

    id: str = Field(description="Name of the model.")
    object: Literal["model"] = Field(description="Type of the object.")
    created: int = Field(description="Always 0: unknown.")
    type: Literal["model"] = Field(description="Type of the object, for Anthropic's clients.")
    display_name: str = Field(description="Name of the model.")
    created_at: str = Field(description="The start of 1970: unknown.")
    lifecycle: Literal["active"] = Field(description="Always `active`.")
    max_input_tokens: int = Field(description="Context length.")
    max_tokens: int = Field(description="Context length.")
    owned_by: str = Field(description="Always `quire`.")
    root: str = Field(description="Name of the model.")
    parent: None = Field(description="Always null.")
    max_model_len: int = Field(description="Context length: maximum tokens of prompt and output together.")
    tool_call_parser: str | None = Field(description="How it writes calls of tools; null if that is not known.")
    reasoning_parser: str | None = Field(description="How it marks thoughts; null if it has none.")
    default_sampling_params: DefaultParameters = Field(description="Values for what requests leave out.")


class Models(BaseModel):
    """The served models."""

    object: Literal["list"] = Field(description="Type of the object.")
    data: list[Model] = Field(description="The models.")
    has_more: Literal[False] = Field(description="Always false: there are no pages.")
    first_id: str | None = Field(description="Name of the first model; null without models.")
    last_id: str | None = Field(description="Name of the last model; null without models.")


class Tokens(BaseModel):
    """The tokens of a prompt."""

    count: int = Field(description="Number of tokens.")
    max_model_len: int = Field(description="Context length of the model.")
    tokens: list[int] = Field(description="Token ids.")
    token_strs: list[str] | None = Field(description="Entries of the tokens in the vocabulary, if requested.")


class RenderedPrompt(BaseModel):
    """The tokens of a prompt that a request would compute."""

    request_id: str = Field(description="Id of the generation, if the client chose it; else a new one.")
    model: str = Field(description="Name of the model.")
    token_ids: list[int] = Field(description="Token ids.")


class Prompt(BaseModel):
    """The text of tokens."""

    prompt: str = Field(description="The text.")


class State(BaseModel):
    """The state of the server."""

    status: Literal["alive", "ready"] = Field(description="The state.")


class Version(BaseModel):
    """The version of the server."""

    version: str = Field(description="Version of the installed package.")


class Load(BaseModel):
    """The load of the gateway."""

    server_load: int = Field(description="Requests in flight at this gateway.")


class WorkerLoad(BaseModel):
    """The load of one engine, with the members that SGLang's server has for one of its ranks."""

    dp_rank: int = Field(description="Position of the engine, from 0.")
    num_reqs: int = Field(description="Requests that run or wait at the engine, of all gateways.")
    num_waiting_reqs: int = Field(description="Those of them that have no blocks yet.")
    num_tokens: int = Field(
        description="Tokens that fit into the blocks of all requests, plus prompt tokens that are not computed yet."
    )


class ServerInfo(BaseModel):
    """What SGLang's router asks of a server."""

    served_model_name: str = Field(description="Name of the only or first served model; empty without an engine.")
    model_path: str = Field(description="The same.")
    version: str = Field(description="Version of the installed package.")


class PrefixCacheReset(BaseModel):
    """The prefix cache was reset."""

    status: Literal["reset"] = Field(description="Always `reset`.")
