"""What a request can use at most, estimated before its prompt is tokenized: tokens, and sequences of an engine."""

from dataclasses import dataclass

from quire.v1 import gateway_pb2


@dataclass(frozen=True)
class Sequences:
    """How many sequences a request runs at once, and the field that says so."""

    count: int
    field: str


ONE_SEQUENCE = Sequences(1, "sampling.sample_count")


def sequences_of(request: gateway_pb2.GenerateRequest) -> Sequences:
    """Return the samples of a request, or the beams of its search."""
    if request.HasField("beam_search"):
        return Sequences(max(1, request.beam_search.width), "beam_search.width")
    return Sequences(max(1, request.sampling.sample_count), ONE_SEQUENCE.field)


def most_tokens(request: gateway_pb2.GenerateRequest, context_tokens: int) -> int:
    """Return how many tokens prompt and answers can have together.

    A token of text has at least one byte. Special tokens and what a chat template writes of its own are not counted:
    there are few of them. Without max_tokens an answer can fill the context.
    """
    sequences = max(1, request.sampling.sample_count, request.beam_search.width)
    stopping = request.stopping
    answer = stopping.max_tokens if stopping.HasField("max_tokens") else context_tokens
    return min(_prompt_tokens(request.prompt), context_tokens) + sequences * min(max(0, answer), context_tokens)


def _prompt_tokens(prompt: gateway_pb2.Prompt) -> int:
    match prompt.WhichOneof("kind"):
        case "token_ids":
            return len(prompt.token_ids.ids)
        case "chat":
            return prompt.chat.ByteSize()
        case _:
            return len(prompt.text.encode())
