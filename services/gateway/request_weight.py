"""How many tokens a request can make an engine keep: what it weighs in the queue."""

from dataclasses import dataclass

from quire.v1 import gateway_pb2
from services.gateway.parameters import Parameters

# What a chat template adds, at most: far more than those of today's models do.
_TEMPLATE_TOKENS = 256
_TEMPLATE_TOKENS_PER_MESSAGE = 16


@dataclass(frozen=True)
class RequestWeight:
    """What the tokens after a prompt weigh: as many as asked for, for each sample or beam, within the context."""

    sequences: int
    max_tokens: int
    context_tokens: int

    @classmethod
    def of(cls, parameters: Parameters, context_tokens: int) -> "RequestWeight":
        """Read it off a request."""
        search, limit = parameters.beam_search, parameters.stopping.max_tokens
        sequences = search.width if search else parameters.sampling.sample_count
        return cls(sequences, context_tokens if limit is None else limit, context_tokens)

    def with_prompt(self, tokens: int) -> int:
        """Return the weight with so many tokens of a prompt.

        Whatever does not fit the context is refused by the engine, so it need not count.
        """
        return min(tokens + self.sequences * self.max_tokens, self.sequences * self.context_tokens)


def most_prompt_tokens(prompt: gateway_pb2.Prompt) -> int:
    """Return an upper limit of a prompt's tokens, without tokenizing it.

    Tokens are at least a byte long, so the message has as many bytes and a few more, which stand for the special
    tokens around a text. Where a tokenizer spells a character out as more bytes than it has, there can be more tokens
    in the end; then these count.
    """
    match prompt.WhichOneof("kind"):
        case "token_ids":
            return len(prompt.token_ids.ids)
        case "chat":
            return prompt.ByteSize() + _TEMPLATE_TOKENS + _TEMPLATE_TOKENS_PER_MESSAGE * len(prompt.chat.messages)
        case _:
            return prompt.ByteSize()
