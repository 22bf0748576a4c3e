"""Log-probabilities of tokens, and of the most likely tokens at the same position."""

from collections.abc import Sequence
from typing import Any

import torch

from engine.attention.upload import Download, upload
from engine.schedule.request import MAX_LOGPROBS
from engine.schedule.step_plan import Sampled

# A long prompt is scored in chunks, because the log-softmax of all rows would take as much memory as the logits.
_CHUNK_ROWS = 128


class Scores:
    """Log-probabilities that are being copied to the host."""

    def __init__(self, logits: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Score a token of each row of `[rows, vocabulary]` logits: `[rows]` int64, on their device."""
        starts = range(0, len(token_ids), _CHUNK_ROWS)
        chunks = [(logits[start : start + _CHUNK_ROWS], token_ids[start : start + _CHUNK_ROWS]) for start in starts]
        self._chunks = [[Download(part) for part in _scored(*chunk)] for chunk in chunks]

    def wait(self, token_ids: Sequence[int], counts: Sequence[int]) -> list[Sampled]:
        """Return the log-probability of each row's token, and of the `counts` most likely tokens.

        Of tokens with equal logits the smaller id comes first. An exception raised for one row is its fault.
        """
        found: list[tuple[Any, Any, Any]] = []
        for chunk in self._chunks:
            found += zip(*(part.wait() for part in chunk), strict=True)
        return [_result(*one) for one in zip(token_ids, counts, found, strict=True)]


def score(logits: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[Sampled]:
    """Return what `Scores.wait` returns, for tokens that the host has."""
    return Scores(logits, upload(token_ids, torch.int64, logits.device)).wait(token_ids, counts)


def _scored(logits: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the log-probability of each row's token, and values and ids of the most likely tokens."""
    logprobs = logits.float().log_softmax(dim=-1)
    # Always the maximum, so that rows are independent: how topk breaks ties depends on k.
    values, ids = logprobs.topk(min(MAX_LOGPROBS, logits.shape[-1]), dim=-1)
    return logprobs.gather(-1, token_ids[:, None])[:, 0], values, ids


def _result(token: int, count: int, found: tuple[float, list[float], list[int]]) -> Sampled:
    logprob, values, ids = found
    try:
        return Sampled(token, logprob, _first(count, ids, values))
    except Exception as fault:
        return Sampled(token, fault=fault)


def _first(count: int, token_ids: list[int], logprobs: list[float]) -> tuple[tuple[int, float], ...]:
    pairs = sorted(zip(token_ids, logprobs, strict=True), key=lambda pair: (-pair[1], pair[0]))
    return tuple(pairs[:count])
