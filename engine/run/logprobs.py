"""Log-probabilities of tokens, and of the most likely tokens at the same position."""

from collections.abc import Sequence

import torch

from engine.schedule.request import MAX_LOGPROBS
from engine.schedule.step_plan import Sampled

# A long prompt is scored in chunks, because the log-softmax of all rows would take as much memory as the logits.
_CHUNK_ROWS = 128


def score(logits: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[Sampled]:
    """Return the log-probability of each row's token, and of the `counts` most likely tokens.

    `logits` is `[rows, vocabulary]`. Of tokens with equal logits the smaller id comes first.
    """
    scored: list[Sampled] = []
    for start in range(0, len(token_ids), _CHUNK_ROWS):
        end = start + _CHUNK_ROWS
        scored += _score_chunk(logits[start:end], token_ids[start:end], counts[start:end])
    return scored


def _score_chunk(logits: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[Sampled]:
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = torch.tensor(token_ids, device=logits.device)[:, None]
    own = logprobs.gather(-1, chosen)[:, 0].tolist()
    # Always the maximum, so that rows are independent: how topk breaks ties depends on k.
    values, ids = logprobs.topk(min(MAX_LOGPROBS, logits.shape[-1]), dim=-1)
    tops = zip(ids.tolist(), values.tolist(), strict=True)
    return [
        Sampled(token, logprob, _first(count, *top))
        for token, logprob, count, top in zip(token_ids, own, counts, tops, strict=True)
    ]


def _first(count: int, token_ids: list[int], logprobs: list[float]) -> tuple[tuple[int, float], ...]:
    pairs = sorted(zip(token_ids, logprobs, strict=True), key=lambda pair: (-pair[1], pair[0]))
    return tuple(pairs[:count])
