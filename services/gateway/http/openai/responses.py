"""What the bodies of answers are, for the description alone: they are written without these classes."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str = Field(description="For people.")
    type: str = Field(description="A kind of errors.")
    param: str | None = Field(description="The field to blame.")
    code: str | None = Field(description="A word for programs.")


class Error(BaseModel):
    """An error."""

    error: ErrorDetail = Field(description="What went wrong.")


class CachedTokens(BaseModel):
    """More of a prompt's tokens."""

    cached_tokens: int = Field(description="Found in the prefix cache.")


class Usage(BaseModel):
    """Tokens counted."""

    prompt_tokens: int = Field(description="Of the prompts.")
    completion_tokens: int = Field(description="Generated, all answers together.")
    total_tokens: int = Field(description="Both.")
    prompt_tokens_details: CachedTokens = Field(description="More of the prompts' tokens.")


class _Choice(BaseModel):
    index: int = Field(description="Which answer: those of the first prompt come first.")
    finish_reason: Literal["stop", "length", "tool_calls"] | None = Field(description="Why it ended.")
    stop_reason: str | int | None = Field(description="The stop string or token that it ran into.")


class CompletionLogprobs(BaseModel):
    """Log-probabilities of an answer's tokens."""

    tokens: list[str] = Field(description="Their texts.")
    token_logprobs: list[float | None] = Field(description="Of each; null for the first of a prompt.")
    top_logprobs: list[dict[str, float] | None] = Field(description="Of the most likely tokens at each place.")
    text_offset: list[int] = Field(description="Where each begins.")


class CompletionChoice(_Choice):
    """One answer."""

    text: str = Field(description="What was generated, behind its prompt where `echo` is asked for.")
    logprobs: CompletionLogprobs | None = Field(description="Where asked for.")
    prompt_logprobs: list[dict[str, Any] | None] | None = Field(None, description="Where asked for, by token id.")


class _Answer(BaseModel):
    id: str = Field(description="The request's id: `quire explain` knows it.")
    created: int = Field(description="Seconds since 1970.")
    model: str = Field(description="Which answers.")
    usage: Usage = Field(description="Tokens counted.")


class Completion(_Answer):
    """The answer of /v1/completions."""

    object: Literal["text_completion"] = Field(description="What it is.")
    choices: list[CompletionChoice] = Field(description="The answers.")


class TokenLogprob(BaseModel):
    """The log-probability of a token."""

    token: str = Field(description="Its text; U+FFFD stands for bytes that are no character.")
    logprob: float = Field(description="The model's own, a natural logarithm.")
    bytes: list[int] = Field(description="What it is exactly.")


class ChatTokenLogprob(TokenLogprob):
    """The log-probability of a token, and those of the most likely ones there."""

    top_logprobs: list[TokenLogprob] = Field(description="Most likely first.")


class ChatLogprobs(BaseModel):
    """Log-probabilities of an answer's tokens."""

    content: list[ChatTokenLogprob] = Field(description="Of each token.")
    refusal: None = Field(description="Null.")


class CalledFunction(BaseModel):
    """What was called."""

    name: str = Field(description="The function.")
    arguments: str = Field(description="A JSON object, as text.")


class ToolCallOutput(BaseModel):
    """A call of a tool."""

    model_config = ConfigDict(title="ToolCall")

    id: str = Field(description="Names the call.")
    type: Literal["function"] = Field(description="What it is.")
    function: CalledFunction = Field(description="What was called.")


class AssistantMessage(BaseModel):
    """What the assistant said."""

    role: Literal["assistant"] = Field(description="Who said it.")
    content: str | None = Field(description="The text; null where it called tools alone.")
    refusal: None = Field(description="Null.")
    tool_calls: list[ToolCallOutput] | None = Field(None, description="What it called.")


class ChatChoice(_Choice):
    """One answer."""

    message: AssistantMessage = Field(description="What was said.")
    logprobs: ChatLogprobs | None = Field(description="Where asked for.")


class ChatCompletion(_Answer):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"] = Field(description="What it is.")
    choices: list[ChatChoice] = Field(description="The answers.")
    prompt_logprobs: list[dict[str, Any] | None] | None = Field(None, description="Where asked for, by token id.")


class Model(BaseModel):
    """A served model."""

    id: str = Field(description="Its name.")
    object: Literal["model"] = Field(description="What it is.")
    created: int = Field(description="0: nobody knows.")
    owned_by: str = Field(description="`quire`.")
    root: str = Field(description="Its name.")
    parent: None = Field(description="Null.")
    max_model_len: int = Field(description="Tokens of prompt and answer together at most.")


class Models(BaseModel):
    """The served models."""

    object: Literal["list"] = Field(description="What it is.")
    data: list[Model] = Field(description="Each of them.")


class Tokens(BaseModel):
    """A prompt as the model sees it."""

    count: int = Field(description="How many tokens.")
    max_model_len: int = Field(description="How many the model takes, those of the answer included.")
    tokens: list[int] = Field(description="Their ids.")
    token_strs: list[str] | None = Field(None, description="Their texts, where asked for.")


class Prompt(BaseModel):
    """The text of tokens."""

    prompt: str = Field(description="The text.")


class State(BaseModel):
    """The state of the server."""

    status: Literal["alive", "ready"] = Field(description="In a word.")


class Version(BaseModel):
    """The version of the server."""

    version: str = Field(description="As its package says.")
