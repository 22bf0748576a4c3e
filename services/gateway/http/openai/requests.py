"""The bodies of requests: what OpenAI's clients send, and what vLLM's users add to it.

A field that is not here is refused by its name. Fields that could change the answer and are not served take null alone.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Tokens = list[Int32]
Real = Annotated[float, Field(allow_inf_nan=False)]
Schema = dict[str, Any]

MOST_PROMPTS = 128


class _Body(BaseModel):
    """Types are taken as they are: no number from a string, no string from a number."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Body):
    """What a stream brings besides its chunks."""

    include_usage: bool | None = Field(None, description="One more chunk at the end, with the tokens counted.")
    continuous_usage_stats: bool | None = Field(
        None, description="With `include_usage`: the tokens counted so far come with every chunk."
    )
    include_obfuscation: bool | None = Field(None, description="Taken, without effect.")


class JsonSchemaFormat(_Body):
    """A JSON schema, as OpenAI's clients wrap it."""

    name: str = Field(description="Its name, without effect.")
    description: str | None = Field(None, description="Taken, without effect.")
    schema_: Schema | bool | None = Field(None, alias="schema", description="The schema. Absent: any JSON object.")
    strict: bool | None = Field(None, description="The answer follows the schema in any case.")


class ResponseFormat(_Body):
    """The language that an answer must belong to."""

    type: Literal["text", "json_object", "json_schema"] = Field(description="Which it is.")
    json_schema: JsonSchemaFormat | None = Field(None, description="With `json_schema`: the schema.")


class StructuredOutputs(_Body):
    """The language that an answer must belong to, as vLLM's users ask for it. One of them."""

    json_: Schema | str | None = Field(None, alias="json", description="A JSON schema, also as text.")
    regex: str | None = Field(None, description="A regular expression that matches the whole answer.")
    choice: list[str] | None = Field(None, description="Texts of which the answer is one.")
    json_object: bool | None = Field(None, description="Any JSON object.")


class GenerationRequest(_Body):
    """What both ways to generate have in common."""

    model: str = Field("", description="Name of a served model. Empty: the only one.")
    temperature: Real | None = Field(None, description="Divides the logits; 0 is greedy. Default 1.")
    top_p: Real | None = Field(None, description="Keeps the most likely tokens up to this probability. Default 1.")
    n: Int32 | None = Field(None, description="Answers for each prompt. Default 1.")
    seed: Int64 | None = Field(None, description="Same seed, same answer.")
    stop: str | list[str] | None = Field(None, description="Texts that end an answer, at most 64.")
    presence_penalty: Real | None = Field(None, description="Subtracted where a token was said. Default 0.")
    frequency_penalty: Real | None = Field(None, description="Subtracted each time that it was. Default 0.")
    logit_bias: dict[str, Real] | None = Field(None, description="Added to logits, by token id.")
    stream: bool | None = Field(None, description="Answer with server-sent events. Default false.")
    stream_options: StreamOptions | None = Field(None, description="For streams.")
    response_format: ResponseFormat | None = Field(None, description="The language that the answer belongs to.")

    top_k: Int32 | None = Field(None, description="Keeps the k most likely tokens; 0 and -1: all.")
    min_p: Real | None = Field(None, description="Keeps tokens this fraction as likely as the most likely one.")
    repetition_penalty: Real | None = Field(None, description="Above 1: what was said is less likely. Default 1.")
    min_tokens: Int32 | None = Field(None, description="Tokens to generate at least. Default 0.")
    stop_token_ids: Tokens | None = Field(None, description="Tokens that end an answer.")
    include_stop_str_in_output: bool | None = Field(None, description="Keeps what ended an answer. Default false.")
    ignore_eos: bool | None = Field(None, description="Goes on after the model's end. Default false.")
    skip_special_tokens: bool | None = Field(None, description="Leaves special tokens out of texts. Default true.")
    spaces_between_special_tokens: Literal[True] | None = Field(None, description="True alone is served.")
    allowed_token_ids: Tokens | None = Field(None, description="Only these tokens can be chosen.")
    prompt_logprobs: Int32 | None = Field(
        None, description="Log-probabilities of the prompt's tokens: so many, 0 to 20."
    )
    use_beam_search: bool | None = Field(None, description="Searches instead of sampling. Default false.")
    best_of: Int32 | None = Field(None, description="Beams of a search, at least `n`. Without a search it must be `n`.")
    length_penalty: Real | None = Field(None, description="Of a beam search: above 0 favours long answers. Default 1.")
    early_stopping: bool | None = Field(None, description="Of a beam search: takes the first answers. Default false.")
    guided_json: Schema | str | None = Field(None, description="As `structured_outputs.json`.")
    guided_regex: str | None = Field(None, description="As `structured_outputs.regex`.")
    guided_choice: list[str] | None = Field(None, description="As `structured_outputs.choice`.")
    structured_outputs: StructuredOutputs | None = Field(None, description="The language that the answer belongs to.")
    cache_salt: str | None = Field(None, description="Shares cached prefixes only with requests of the same salt.")
    priority: Int32 | None = Field(None, description="Class of service: smaller is served first. Default 0.")
    request_id: str | None = Field(None, description="Names the request; the header X-Request-Id does so too.")
    timeout: Real | None = Field(None, description="Seconds allowed from arrival to the last token.")

    user: str | None = Field(None, description="Taken, without effect.")
    metadata: dict[str, str] | None = Field(None, description="Taken, without effect.")
    store: bool | None = Field(None, description="Taken, without effect: nothing is stored.")
    service_tier: str | None = Field(None, description="Taken, without effect.")
    safety_identifier: str | None = Field(None, description="Taken, without effect.")
    prompt_cache_key: str | None = Field(
        None, description="Taken, without effect: equal prefixes are found by themselves."
    )

    truncate_prompt_tokens: None = Field(None, description="Not served.")
    guided_grammar: None = Field(None, description="Not served.")
    bad_words: None = Field(None, description="Not served.")


class CompletionRequest(GenerationRequest):
    """The body of /v1/completions."""

    prompt: str | list[str] | Tokens | list[Tokens] = Field(
        description=f"Text or token ids to continue, or a list of up to {MOST_PROMPTS} of either."
    )
    max_tokens: Int32 | None = Field(None, description="Tokens to generate at most, for each answer. Default 16.")
    logprobs: Int32 | None = Field(None, description="Log-probabilities of this many most likely tokens, 0 to 20.")
    echo: bool | None = Field(None, description="Begins each answer with its prompt. Default false.")
    add_special_tokens: Literal[True] | None = Field(None, description="True alone is served.")
    suffix: None = Field(None, description="Not served.")


class FunctionCall(_Body):
    """What an assistant called."""

    name: str = Field(description="Name of the function.")
    arguments: str = Field(description="A JSON object, as text.")
    parsed_arguments: Any = Field(None, description="Taken, without effect: OpenAI's client adds it.")


class ToolCallInput(_Body):
    """A call of a tool in an assistant's turn."""

    model_config = ConfigDict(title="ToolCall")

    id: str = Field("", description="Names the call.")
    type: Literal["function"] = Field("function", description="Functions alone are called.")
    function: FunctionCall = Field(description="What was called.")
    index: Int32 | None = Field(None, description="Taken, without effect.")


class ContentPart(BaseModel):
    """A part of what is said. Those of type `text` are joined; no other type is served."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str = Field(description="`text`.")
    text: str | None = Field(None, description="The text.")


class ChatMessage(_Body):
    """One turn of a conversation."""

    role: str = Field(description="`system`, `user`, `assistant`, `tool`, or what the chat template knows besides.")
    content: str | list[ContentPart] | None = Field(None, description="What is said.")
    name: str | None = Field(None, description="Who speaks, where the chat template tells them apart.")
    tool_calls: list[ToolCallInput] | None = Field(None, description="Of an assistant: what it called.")
    tool_call_id: str | None = Field(None, description="Of a tool: the call that it answers.")

    parsed: Any = Field(None, description="Taken, without effect: OpenAI's client adds it.")
    refusal: None = Field(None, description="Answers of this server have it as null.")
    annotations: Annotated[list[Any], Field(max_length=0)] | None = Field(None, description="Empty alone is served.")
    audio: None = Field(None, description="Not served.")
    function_call: None = Field(None, description="Not served.")


class Function(_Body):
    """A function that the assistant may call."""

    name: str = Field(description="Its name.")
    description: str | None = Field(None, description="What it does, for the model.")
    parameters: Schema | None = Field(None, description="JSON schema of its arguments. Absent: it has none.")
    strict: bool | None = Field(
        None, description="Where a call is required, arguments follow the schema in any case; else the model decides."
    )


class Tool(_Body):
    """A tool that the assistant may call."""

    type: Literal["function"] = Field(description="Functions alone are served.")
    function: Function = Field(description="The function.")


class NamedFunction(_Body):
    """The name of a function."""

    name: str = Field(description="As in `tools`.")


class NamedTool(_Body):
    """The tool that has to be called."""

    type: Literal["function"] = Field(description="Functions alone are served.")
    function: NamedFunction = Field(description="Which one.")


class ChatCompletionRequest(GenerationRequest):
    """The body of /v1/chat/completions."""

    messages: list[ChatMessage] = Field(description="The conversation, oldest turn first.")
    max_tokens: Int32 | None = Field(None, description="Tokens to generate at most. Absent: what fits.")
    max_completion_tokens: Int32 | None = Field(None, description="The same, as OpenAI calls it now.")
    logprobs: bool | None = Field(None, description="Log-probabilities of the answer's tokens. Default false.")
    top_logprobs: Int32 | None = Field(
        None, description="With `logprobs`: those of so many most likely tokens, 0 to 20."
    )
    tools: list[Tool] | None = Field(None, description="What may be called, where the chat template knows tools.")
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = Field(
        None, description="Whether a tool may, must or must not be called, or which one must. Default `auto`."
    )
    parallel_tool_calls: bool | None = Field(None, description="False: one call at most. Default true.")
    modalities: list[Literal["text"]] | None = Field(None, description="Text alone is served.")
    add_generation_prompt: Literal[True] | None = Field(None, description="True alone is served.")

    audio: None = Field(None, description="Not served.")
    functions: None = Field(None, description="Not served: use `tools`.")
    function_call: None = Field(None, description="Not served: use `tool_choice`.")
    prediction: None = Field(None, description="Not served.")
    reasoning_effort: None = Field(None, description="Not served.")
    verbosity: None = Field(None, description="Not served.")
    web_search_options: None = Field(None, description="Not served.")
    chat_template: None = Field(None, description="Not served.")
    chat_template_kwargs: None = Field(None, description="Not served.")


class TokenizeRequest(_Body):
    """The body of /tokenize: a prompt, or the messages of a chat."""

    model: str = Field("", description="Name of a served model. Empty: the only one.")
    prompt: str | None = Field(None, description="Text, to which the model's special tokens are added.")
    messages: list[ChatMessage] | None = Field(None, description="A conversation instead.")
    tools: list[Tool] | None = Field(None, description="What may be called in it.")
    add_generation_prompt: bool | None = Field(None, description="Opens the assistant's turn. Default true.")
    add_special_tokens: Literal[True] | None = Field(None, description="True alone is served.")
    return_token_strs: bool | None = Field(None, description="Also gives each token as text. Default false.")


class DetokenizeRequest(_Body):
    """The body of /detokenize."""

    model: str = Field("", description="Name of a served model. Empty: the only one.")
    tokens: Tokens = Field(description="Token ids.")
