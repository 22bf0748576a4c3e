"""Log-probabilities in the shapes of the two ways to generate, and of vLLM's for prompts."""

from collections.abc import Sequence
from typing import Any

from quire.v1 import decoding_pb2
from services.gateway.text.tokenizer import Tokenizer

Logprobs = Sequence[decoding_pb2.TokenLogprobs]


def of_chat(tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Logprobs) -> dict[str, Any]:
    """Return those of some tokens as chats have them."""
    content = []
    for token, its in zip(token_ids, logprobs, strict=True):
        tops = zip(its.top_token_ids, its.top_logprobs, strict=True)
        scored_tops = [_token(tokenizer, top, logprob) for top, logprob in tops]
        content.append(_token(tokenizer, token, its.logprob) | {"top_logprobs": scored_tops})
    return {"content": content, "refusal": None}


class CompletionLogprobsWriter:
    """Those of one answer of /v1/completions, as many calls as it comes in."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def of(self, token_ids: Sequence[int], logprobs: Sequence[decoding_pb2.TokenLogprobs | None]) -> dict[str, Any]:
        """Return those of the next tokens; None for one before which the model has no expectation."""
        tokens = [self._text(token) for token in token_ids]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [None if its is None else its.logprob for its in logprobs],
            "top_logprobs": [
                None if its is None else self._tops(token, its) for token, its in zip(tokens, logprobs, strict=True)
            ],
            "text_offset": offsets,
        }

    def _tops(self, token: str, its: decoding_pb2.TokenLogprobs) -> dict[str, float]:
        """Return the most likely tokens and the one that stands there. Of those with the same text, the likeliest."""
        tops: dict[str, float] = {}
        for top, logprob in zip(its.top_token_ids, its.top_logprobs, strict=True):
            tops.setdefault(self._text(top), logprob)
        tops.setdefault(token, its.logprob)
        return tops

    def _text(self, token: int) -> str:
        return _decoded(self._tokenizer, token)


def of_prompt(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[decoding_pb2.TokenLogprobs | None]
) -> list[dict[str, Any] | None]:
    """Return those of a prompt as vLLM has them: by token id, with the rank where it is known. None for the first."""
    return [
        None if its is None else _ranked(tokenizer, token, its) for token, its in zip(token_ids, logprobs, strict=True)
    ]


def _ranked(tokenizer: Tokenizer, token: int, its: decoding_pb2.TokenLogprobs) -> dict[str, Any]:
    ranked: dict[int, tuple[float, int | None]] = {}
    for rank, (top, logprob) in enumerate(zip(its.top_token_ids, its.top_logprobs, strict=True), start=1):
        ranked[top] = logprob, rank
    ranked.setdefault(token, (its.logprob, None))
    return {
        str(one): {"logprob": logprob, "rank": rank, "decoded_token": _decoded(tokenizer, one)}
        for one, (logprob, rank) in ranked.items()
    }


def _token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    spelled = tokenizer.bytes_of(token)
    return {"token": spelled.decode(errors="replace"), "logprob": logprob, "bytes": list(spelled)}


def _decoded(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.bytes_of(token).decode(errors="replace")
