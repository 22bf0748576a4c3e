"""The most likely continuations of beams, for all rows of a batch at once."""

from collections.abc import Sequence

import torch

from engine.run.logit_rules import apply_rules
from engine.schedule.step_plan import RowRules, Sampled

_CHUNK_ROWS = 128


def continuations(logits: torch.Tensor, rules: Sequence[RowRules | None], counts: Sequence[int]) -> list[Sampled]:
    """Return for each row of `[rows, vocabulary]` logits its `counts` most likely tokens that the rules allow.

    Rules change log-probabilities here, as in transformers' beam search, without normalizing again. Of tokens with
    equal log-probabilities the smaller id comes first.
    """
    found: list[Sampled] = []
    for start in range(0, len(rules), _CHUNK_ROWS):
        end = start + _CHUNK_ROWS
        logprobs = apply_rules(logits[start:end].float().log_softmax(dim=-1), rules[start:end])
        found += [_likeliest(row, count) for row, count in zip(logprobs, counts[start:end], strict=True)]
    return found


def _likeliest(logprobs: torch.Tensor, count: int) -> Sampled:
    # Row by row, so that the choice among equal values does not depend on other rows.
    values, token_ids = logprobs.topk(min(count, len(logprobs)))
    pairs = [pair for pair in zip(token_ids.tolist(), values.tolist(), strict=True) if pair[1] > float("-inf")]
    pairs.sort(key=lambda pair: (-pair[1], pair[0]))
    return Sampled(pairs[0][0] if pairs else 0, None, tuple(pairs))
