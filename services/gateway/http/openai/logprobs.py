"""Log-probabilities in the formats of completions, of chats, and of vLLM's `prompt_logprobs`."""

from collections.abc import Sequence
from typing import Any

from quire.v1 import decoding_pb2
from services.gateway.text.tokenizer import Tokenizer

Logprobs = Sequence[decoding_pb2.TokenLogprobs]


def for_chat(tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Logprobs) -> dict[str, Any]:
    """Return the log-probabilities of tokens in the format of chats."""
    content = []
    for token, scores in zip(token_ids, logprobs, strict=True):
        tops = zip(scores.top_token_ids, scores.top_logprobs, strict=True)
        scored_tops = [_token(tokenizer, top, logprob) for top, logprob in tops]
        content.append(_token(tokenizer, token, scores.logprob) | {"top_logprobs": scored_tops})
    return {"content": content, "refusal": None}


def for_completion(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[decoding_pb2.TokenLogprobs | None],
    offsets: Sequence[int],
) -> dict[str, Any]:
    """Return the log-probabilities of tokens of a completion. The first token of a prompt has None.

    `offsets` are where the tokens begin in the text of the choice, in characters.
    """
    return {
        "tokens": [_decoded(tokenizer, token) for token in token_ids],
        "token_logprobs": [None if scores is None else scores.logprob for scores in logprobs],
        "top_logprobs": [
            None if scores is None else _tops(tokenizer, token, scores)
            for token, scores in zip(token_ids, logprobs, strict=True)
        ],
        "text_offset": list(offsets),
    }


def _tops(tokenizer: Tokenizer, token: int, scores: decoding_pb2.TokenLogprobs) -> dict[str, float]:
    """Return the most likely tokens and `token`. Of tokens with equal text, the most likely one counts."""
    tops: dict[str, float] = {}
    for top, logprob in zip(scores.top_token_ids, scores.top_logprobs, strict=True):
        tops.setdefault(_decoded(tokenizer, top), logprob)
    tops.setdefault(_decoded(tokenizer, token), scores.logprob)
    return tops


def for_prompt(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[decoding_pb2.TokenLogprobs | None]
) -> list[dict[str, Any] | None]:
    """Return the log-probabilities of a prompt in vLLM's format: by token id, with the rank if known.

    The first token has None.
    """
    return [
        None if scores is None else _ranked(tokenizer, token, scores)
        for token, scores in zip(token_ids, logprobs, strict=True)
    ]


def _ranked(tokenizer: Tokenizer, token: int, scores: decoding_pb2.TokenLogprobs) -> dict[str, Any]:
    ranked: dict[int, tuple[float, int | None]] = {}
    for rank, (top, logprob) in enumerate(zip(scores.top_token_ids, scores.top_logprobs, strict=True), start=1):
        ranked[top] = logprob, rank
    ranked.setdefault(token, (scores.logprob, None))
    return {
        str(one): {"logprob": logprob, "rank": rank, "decoded_token": _decoded(tokenizer, one)}
        for one, (logprob, rank) in ranked.items()
    }


def _token(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    spelled = tokenizer.bytes_of(token)
    return {"token": spelled.decode(errors="replace"), "logprob": logprob, "bytes": list(spelled)}


def _decoded(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.bytes_of(token).decode(errors="replace")
