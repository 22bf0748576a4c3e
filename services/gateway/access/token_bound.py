"""Upper bounds of the tokens and sequences that a request can use, computed before its prompt is tokenized."""

from dataclasses import dataclass

from quire.v1 import decoding_pb2, gateway_pb2


@dataclass(frozen=True)
class Sequences:
    """The number of sequences that a request runs at once, and the field that sets it."""

    count: int
    field: str


ONE_SEQUENCE = Sequences(1, "sampling.sample_count")


def sequences_of(request: gateway_pb2.GenerateRequest) -> Sequences:
    """Return the number of samples, or of beams in a beam search."""
    if request.HasField("beam_search"):
        return Sequences(max(1, request.beam_search.width), "beam_search.width")
    return Sequences(max(1, request.sampling.sample_count), ONE_SEQUENCE.field)


def token_upper_bound(
    request: gateway_pb2.GenerateRequest, context_tokens: int, defaults: decoding_pb2.GenerationDefaults
) -> int:
    """Return an upper bound of a request's tokens, prompt and samples together.

    A text token has at least one byte. The few special tokens, and the text that a chat template adds, are not counted.
    Without max_tokens, in the request or the model's `defaults`, a sample can fill the context.
    """
    sequences = max(1, request.sampling.sample_count, request.beam_search.width)
    stopping = request.stopping
    max_tokens = stopping.max_tokens if stopping.HasField("max_tokens") else context_tokens
    if not stopping.HasField("max_tokens") and defaults.HasField("max_tokens"):
        max_tokens = max(defaults.max_tokens, stopping.min_tokens)
    kept = request.truncate_prompt_tokens if request.truncate_prompt_tokens > 0 else context_tokens
    prompt_tokens = min(_prompt_tokens(request.prompt), kept, context_tokens)
    return prompt_tokens + sequences * min(max(0, max_tokens), context_tokens)


def _prompt_tokens(prompt: gateway_pb2.Prompt) -> int:
    match prompt.WhichOneof("kind"):
        case "token_ids":
            return len(prompt.token_ids.ids)
        case "chat":
            return prompt.chat.ByteSize()
        case _:
            return len(prompt.text.encode())
