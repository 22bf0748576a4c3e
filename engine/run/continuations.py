"""The likeliest continuations of beams, all rows of a batch at once."""

from collections.abc import Sequence

import torch

from engine.run.logit_rules import apply_rules
from engine.schedule.step_plan import RowRules, Sampled

_ROWS_AT_ONCE = 128


def continuations(logits: torch.Tensor, rules: Sequence[RowRules | None], counts: Sequence[int]) -> list[Sampled]:
    """Return for each row of `[rows, vocabulary]` logits so many of its likeliest tokens, but none that rules forbid.

    The rules change log-probabilities here, as they do in transformers' beam search, and nothing is normalised again.
    Of tokens with equal log-probabilities the smaller id comes first.
    """
    found: list[Sampled] = []
    for start in range(0, len(rules), _ROWS_AT_ONCE):
        end = start + _ROWS_AT_ONCE
        logprobs = apply_rules(logits[start:end].float().log_softmax(dim=-1), rules[start:end])
        found += [_likeliest(row, count) for row, count in zip(logprobs, counts[start:end], strict=True)]
    return found


def _likeliest(logprobs: torch.Tensor, count: int) -> Sampled:
    # Row by row: which of equal ones topk takes must not depend on what other rows ask for.
    values, token_ids = logprobs.topk(min(count, len(logprobs)))
    pairs = [pair for pair in zip(token_ids.tolist(), values.tolist(), strict=True) if pair[1] > float("-inf")]
    pairs.sort(key=lambda pair: (-pair[1], pair[0]))
    return Sampled(pairs[0][0] if pairs else 0, None, tuple(pairs))
