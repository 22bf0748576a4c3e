"""Log-probabilities of tokens: of those that stand in the text, and of the most likely ones beside them."""

from collections.abc import Sequence

import torch

from engine.schedule.request import MAX_LOGPROBS
from engine.schedule.step_plan import Sampled

# A long prompt is scored in pieces: the log-softmax of all its rows at once would take as much memory as its logits.
_ROWS_AT_ONCE = 128


def score(logits: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[Sampled]:
    """Return for each row of `[rows, vocabulary]` logits its token's log-probability, and so many most likely tokens.

    Of tokens with equal logits the smaller id comes first.
    """
    scored: list[Sampled] = []
    for start in range(0, len(token_ids), _ROWS_AT_ONCE):
        end = start + _ROWS_AT_ONCE
        scored += _score_piece(logits[start:end], token_ids[start:end], counts[start:end])
    return scored


def _score_piece(logits: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[Sampled]:
    logprobs = logits.float().log_softmax(dim=-1)
    chosen = torch.tensor(token_ids, device=logits.device)[:, None]
    own = logprobs.gather(-1, chosen)[:, 0].tolist()
    # Always as many as can be asked for, so that a row depends on no other: topk breaks ties as its size tells it to.
    values, ids = logprobs.topk(min(MAX_LOGPROBS, logits.shape[-1]), dim=-1)
    tops = zip(ids.tolist(), values.tolist(), strict=True)
    return [
        Sampled(token, logprob, _first(count, *top))
        for token, logprob, count, top in zip(token_ids, own, counts, tops, strict=True)
    ]


def _first(count: int, token_ids: list[int], logprobs: list[float]) -> tuple[tuple[int, float], ...]:
    pairs = sorted(zip(token_ids, logprobs, strict=True), key=lambda pair: (-pair[1], pair[0]))
    return tuple(pairs[:count])
